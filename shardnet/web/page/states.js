// What a worker's state means for how it is drawn: `kind` is a class, `sign` a badge, so that colour is never alone.

export function condition(worker) {
  if (worker.state === "gone") return { kind: "dead", sign: "×", word: "gone" };
  if (worker.state === "not serving") return { kind: "paused", sign: "‖", word: "not serving" };
  if (worker.state !== "serving") return { kind: "dead", sign: "×", word: worker.state };
  if (worker.late) return { kind: "late", sign: "!", word: "late" };
  return { kind: "well", sign: "", word: "" };
}

// A job's states in which nobody is left.
export const OVER = ["finished", "lost"];
