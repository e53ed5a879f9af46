// A button that copies a text. Browsers let pages write to the clipboard over HTTPS and on localhost alone: elsewhere the text is
// shown, selected, for the reader to copy.
import { h, useEffect, useRef, useSignal } from "../vendor/preact.js";

/** @param {{ text: () => string, label: string, about: string }} props `about` goes behind the label for readers who do not see where the button stands */
export function Copy({ text, label, about }) {
  const said = useSignal("");
  const shown = useSignal("");
  /** @type {{ current: HTMLTextAreaElement | null }} */
  const area = useRef(null);
  useEffect(() => area.current?.select(), [shown.value]);
  useEffect(() => {
    if (!said.value) return;
    const timer = setTimeout(() => (said.value = ""), 2000);
    return () => clearTimeout(timer);
  }, [said.value]);
  const copy = async () => {
    const found = text();
    try {
      await navigator.clipboard.writeText(found);
      said.value = "Copied";
    } catch {
      shown.value = shown.value ? "" : found;
    }
  };
  return [
    h("button", { type: "button", class: "copy", "aria-label": said.value || `${label}${about}`, onClick: copy }, said.value || label),
    shown.value && h("textarea", { ref: area, class: "code copied", readOnly: true, rows: Math.min(12, shown.value.split("\n").length), "aria-label": `${label}${about}: the text to copy` }, shown.value),
  ];
}
