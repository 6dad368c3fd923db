// A long sample text: a poem with repeated cantos, generated from a fixed seed.

const ORDER = [0, 1, 2, 0, 3, 1, 4, 0]; // order of the cantos: the first appears three times, the second twice
const STANZAS = 20; // per canto, each with its own names
const FIRST_SYLLABLES = ["ba", "de", "ka", "lo", "mi", "na", "pe", "ro", "sa", "ti", "vu", "we", "zo", "fi", "gu", "hy"];
const LAST_SYLLABLES = ["len", "rin", "dor", "mas", "nel", "tis", "von", "rak", "lia", "sos", "mir", "dan"];
const LINES = [
  "and then N found N and sang with N until N came home",
  "but N was waiting for N by the water where N had been",
  "so N gave N to N and nobody asked what N had said",
  "when N saw N again the bells of N rang for N",
];
const REFRAIN = "O row my darling row me home the night is long and the sea is wide";

// A linear congruential generator of random integers
function seededRandom(seed) {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

function makeStanza(words, names, random) {
  const lines = [];
  let length = REFRAIN.split(" ").length;
  while (length < words) {
    const line = LINES[random(LINES.length)].replaceAll("N", () => names[random(names.length)]);
    lines.push(line);
    length += line.split(" ").length;
  }
  return [...lines, REFRAIN].join("\n");
}

function makeCanto(number, words) {
  const random = seededRandom(1789 + number);
  const makeName = () => {
    const name = FIRST_SYLLABLES[random(FIRST_SYLLABLES.length)] + FIRST_SYLLABLES[random(FIRST_SYLLABLES.length)] + LAST_SYLLABLES[random(LAST_SYLLABLES.length)];
    return name.charAt(0).toUpperCase() + name.slice(1);
  };
  const stanzas = Array.from({ length: STANZAS }, () => makeStanza(words / STANZAS, Array.from({ length: 8 }, makeName), random));
  return `${stanzas.join("\n\n")}\n\n\n`;
}

// Returns a text of this many words
export function sampleText(words) {
  const text = ORDER.map((number) => makeCanto(number, words / ORDER.length)).join("");
  return text.split(/(?<=\s)(?=\S)/).slice(0, words).join("").trim();
}
