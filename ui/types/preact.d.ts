// What the page uses of its bundle (vendor-entry.js), as its modules are checked against it. Written by hand, so that
// checking wants the compiler alone; tests/ui/test_types.py holds its names to those of the bundle.

export interface VNode {
  readonly type: unknown;
  readonly props: unknown;
}
export type Child = VNode | string | number | bigint | boolean | null | undefined | Child[];
type WithKey<P> = Omit<P, "children"> & { key?: string | number | null };

export function h(element: string, attributes: Record<string, any> | null, ...children: Child[]): VNode;
/** A component's children come behind its properties; without any that it must have, they may be left out. */
export function h<P extends object>(
  component: (props: P) => Child,
  props: {} extends Omit<P, "children"> ? WithKey<P> | null : WithKey<P>,
  ...children: Child[]
): VNode;
export function render(what: Child, into: Element): void;
export const Fragment: (props: { children?: Child }) => Child;

export function useEffect(run: () => void | (() => void), inputs?: readonly unknown[]): void;
/** Before anything is painted; `useEffect` runs after that. */
export function useLayoutEffect(run: () => void | (() => void), inputs?: readonly unknown[]): void;
export function useRef<T>(value: T): { current: T };

export interface Signal<T> {
  value: T;
  peek(): T;
  subscribe(run: (value: T) => void): () => void;
}
export function signal<T>(value: T): Signal<T>;
export function useSignal<T>(value: T): Signal<T>;
export function computed<T>(of: () => T): { readonly value: T; peek(): T };
export function effect(run: () => void | (() => void)): () => void;
export function batch<T>(run: () => T): T;
