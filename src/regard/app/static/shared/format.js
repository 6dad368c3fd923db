// Numbers as text: two decimals, "·" for values that round to zero; the exact value belongs in a tooltip.

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// Two decimals, or "·" for values that round to zero
export function formatNumber(number, digits = 2) {
  const special = notFinite(number);
  if (special) return special;
  if (Math.abs(number) < 10 ** -digits / 2) return "·";
  return Math.abs(number) < 1e6 ? withMinus(number.toFixed(digits)) : scientific(number);
}

// Up to six significant digits: 2, 0.4375, 3.2·10⁻⁷
export function formatExact(number) {
  const special = notFinite(number);
  if (special) return special;
  const size = Math.abs(number);
  return size !== 0 && (size < 1e-4 || size >= 1e6) ? scientific(number) : withMinus(String(Number(number.toPrecision(6))));
}

// Up to three decimals, without trailing zeros, for calculations: 2, 0.438, 3.2·10⁻⁷
export function formatShort(number, digits = 3) {
  const special = notFinite(number);
  if (special) return special;
  const size = Math.abs(number);
  if (size !== 0 && (size < 10 ** -digits / 2 || size >= 1e6)) return scientific(number);
  return withMinus(String(Number(number.toFixed(digits))));
}

function notFinite(number) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  return Number.isFinite(number) ? "" : number > 0 ? "∞" : "−∞";
}

function withMinus(text) {
  return text.replace(/^-/, "−");
}

function scientific(number) {
  const [digits, exponent] = number.toExponential(1).split("e");
  const raised = [...String(Number(exponent))].map((digit) => SUPERSCRIPT[digit]).join("");
  return `${digits.replace("-", "−").replace(/\.0$/, "")}·10${raised}`;
}
