// The timeline of the page at /ui, as it is, played from a recording: whoever asks for a server's frames gets those of
// recording.bin, each when its time has come. `make docs` puts the page's modules beside this one; `python -m tests.ui.demo`
// makes the recording.
import { h, render, signal } from "./ui/vendor/preact.js";
import { Timeline } from "./ui/pages/timeline.js";
import { Decoder, TYPES } from "./ui/timeline/decode.js";

const HEADER = 8;
/** Where playing is: starting, playing, over; or what is wrong. */
const state = signal("starting");
const ask = globalThis.fetch.bind(globalThis);
/** @type {Promise<{ data: Uint8Array, pieces: { from: number, to: number, at: number }[], gauges: Uint8Array }>} */
const recording = load();
// the next piece, and by how much the page's clock is ahead of the recording's
let next = 0;
let ahead = NaN;

/** The frames, cut before each step that was planned. */
async function load() {
  const packed = await ask("recording.bin");
  if (!packed.ok || !packed.body) throw new Error(`the recording did not come: ${packed.status}`);
  const data = new Uint8Array(await new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
  const view = new DataView(data.buffer);
  const pieces = [{ from: 0, to: data.length, at: 0 }];
  let gauges = data.subarray(0, 0);
  for (let at = 0; at < data.length; ) {
    const end = at + HEADER + view.getUint32(at + 4, true);
    if (data[at] === TYPES.plan) {
      pieces[pieces.length - 1].to = at;
      pieces.push({ from: at, to: data.length, at: new Decoder().feed(data.subarray(at, end))[0].planned });
    } else if (data[at] === TYPES.gauges) gauges = data.subarray(at, end);
    at = end;
  }
  pieces[0].at = pieces[1]?.at ?? 0;
  return { data, pieces, gauges };
}

/** What a server would send from now on. @param {AbortSignal | null | undefined} stop */
async function play(stop) {
  const { data, pieces, gauges } = await recording;
  let timer = 0;
  const body = new ReadableStream({
    start(controller) {
      stop?.addEventListener("abort", () => {
        clearTimeout(timer);
        controller.error(stop.reason);
      });
      if (next < pieces.length) ahead = performance.now() / 1000 - pieces[next].at;
      state.value = "playing";
      const tick = () => {
        const now = performance.now() / 1000 - ahead;
        while (next < pieces.length && pieces[next].at <= now) {
          controller.enqueue(data.slice(pieces[next].from, pieces[next].to));
          next++;
        }
        if (next < pieces.length) timer = setTimeout(tick, 40);
        else {
          // nothing more happens there, as on a server that has nothing to do
          state.value = "over";
          controller.enqueue(gauges.slice());
          timer = setTimeout(tick, 1000);
        }
      };
      tick();
    },
    cancel: () => clearTimeout(timer),
  });
  return new Response(body, { headers: { "Content-Type": "application/octet-stream" } });
}

globalThis.fetch = (what, options) => (String(what).includes("/ui/api/timeline") ? play(options?.signal) : ask(what, options));
recording.catch((error) => (state.value = error.message));

/** In the colours of the page around it, where there is one. */
function dress() {
  const around = window.parent === window ? null : window.parent.document.body;
  const scheme = around?.dataset.mdColorScheme;
  document.documentElement.dataset.theme = scheme ? (scheme === "slate" ? "dark" : "light") : "auto";
  return around;
}
const around = dress();
if (around) new MutationObserver(dress).observe(around, { attributes: true, attributeFilter: ["data-md-color-scheme"] });

/** @type {Record<string, string>} */
const WORDS = {
  starting: "Loading the recording.",
  playing: "Forty seconds of a server: chats that were promised their first token within 400 ms, and long documents that have time. Space stops it.",
  over: "That was all. Look at any step, or",
};

function Demo() {
  const said = WORDS[state.value] ?? state.value;
  return [
    h("main", { id: "main" },
      h("p", { class: "pad demo-says", role: "status" }, said, state.value === "over" && [" ", h("button", { type: "button", onClick: () => location.reload() }, "play it again")]),
      h(Timeline, { shown: true })),
  ];
}
render(h(Demo, null), /** @type {Element} */ (document.getElementById("demo")));
