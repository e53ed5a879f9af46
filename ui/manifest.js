// Writes MANIFEST.json (versions, sizes, digests) and LICENSES.txt beside a bundle.
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const PARTS = ["preact", "@preact/signals", "@preact/signals-core"];
const out = process.argv[2];
const lock = JSON.parse(readFileSync("package-lock.json", "utf8")).packages;
const bundle = readFileSync(join(out, "preact.js"));
const manifest = {
  files: {
    "preact.js": { bytes: bundle.length, sha256: createHash("sha256").update(bundle).digest("hex") },
  },
  parts: Object.fromEntries(
    PARTS.map((name) => {
      const { version, license } = lock[`node_modules/${name}`];
      return [name, { version, license }];
    }),
  ),
};
writeFileSync(join(out, "MANIFEST.json"), JSON.stringify(manifest, null, 2) + "\n");
const licences = PARTS.map((name) => {
  const text = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  return `${name} ${manifest.parts[name].version}\n\n${text}\n`;
});
writeFileSync(join(out, "LICENSES.txt"), licences.join(`\n${"-".repeat(72)}\n\n`));
