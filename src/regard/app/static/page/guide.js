// The chapters of the guide, and links to them.

import { make } from "../shared/dom.js";

export const CHAPTERS = {
  "from-a-dictionary-to-attention": "1. From a dictionary to attention",
  "scores-and-normalizers": "2. Scores and normalizers",
  "before-attention": "3. Translation before attention",
  "attention-for-translation": "4. Attention for translation",
  "self-attention": "5. Self-attention as a layer",
  "order": "6. Order",
  "transformer": "7. The Transformer",
  "words-in-context": "8. Words in context",
  "looking-inside": "9. Looking inside",
  "how-it-is-fast": "10. Why it is fast",
};

// base: address of the guide. Without an address, chapters are named but not linked
export function chapterLinks(base, names) {
  if (!names.length) return [];
  const nodes = names.map((name) => {
    const title = CHAPTERS[name].replace(". ", ".\u00a0"); // no line break after the number
    return base ? make("a", { href: `${base.replace(/\/$/, "")}/path/${name}.html`, target: "_blank", rel: "noopener" }, title) : make("span", { title: `docs/path/${name}.md in the repository; make docs builds the guide` }, title);
  });
  return ["Guide: ", ...nodes.flatMap((node, index) => (index ? [", ", node] : [node]))];
}
