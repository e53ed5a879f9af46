// What the page uses of other people's code; scripts/vendor-ui bundles it.
export { h, render, Fragment } from "preact";
export { useEffect, useLayoutEffect, useRef } from "preact/hooks";
export { signal, computed, effect, batch, useSignal } from "@preact/signals";
