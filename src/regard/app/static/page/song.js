// A long text to try: an epic whose cantos come back word for word, the same every time it is made.

const ORDER = [0, 1, 2, 0, 3, 1, 4, 0]; // of the cantos: the first is sung three times, the second twice
const STANZAS = 20; // in a canto, each with names of its own
const BEGIN = ["ba", "de", "ka", "lo", "mi", "na", "pe", "ro", "sa", "ti", "vu", "we", "zo", "fi", "gu", "hy"];
const END = ["len", "rin", "dor", "mas", "nel", "tis", "von", "rak", "lia", "sos", "mir", "dan"];
const LINES = [
  "and then N found N and sang with N until N came home",
  "but N was waiting for N by the water where N had been",
  "so N gave N to N and nobody asked what N had said",
  "when N saw N again the bells of N rang for N",
];
const REFRAIN = "O row my darling row me home the night is long and the sea is wide";

// Numbers from a seed: a linear congruential generator, good enough for verses
function dice(seed) {
  let state = seed;
  return (sides) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * sides);
  };
}

// So many words of lines about the same few names, and a refrain at the end
function stanza(words, names, cast) {
  const lines = [];
  let length = REFRAIN.split(" ").length;
  while (length < words) {
    const line = LINES[cast(LINES.length)].replaceAll("N", () => names[cast(names.length)]);
    lines.push(line);
    length += line.split(" ").length;
  }
  return [...lines, REFRAIN].join("\n");
}

function canto(number, words) {
  const cast = dice(1789 + number);
  const name = () => {
    const made = BEGIN[cast(BEGIN.length)] + BEGIN[cast(BEGIN.length)] + END[cast(END.length)];
    return made.charAt(0).toUpperCase() + made.slice(1);
  };
  const stanzas = Array.from({ length: STANZAS }, () => stanza(words / STANZAS, Array.from({ length: 8 }, name), cast));
  return `${stanzas.join("\n\n")}\n\n\n`;
}

// A text of so many words
export function song(words) {
  const each = words / ORDER.length;
  const text = ORDER.map((number) => canto(number, each)).join("");
  return text.split(/(?<=\s)(?=\S)/).slice(0, words).join("").trim();
}
