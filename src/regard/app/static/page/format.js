// Numbers as text.

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// A fixed number of digits; scientific notation for very small and very large numbers
export function formatNumber(number, digits = 2) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (size !== 0 && (size < 10 ** -digits / 2 || size >= 1e6)) return scientific(number);
  return number.toFixed(digits).replace(/^-/, "−");
}

// Without trailing zeros: 2 instead of 2.00
export function formatShort(number, digits = 3) {
  const text = formatNumber(number, digits);
  return text.includes(".") && !text.includes("·") ? text.replace(/\.?0+$/, "") : text;
}

function scientific(number) {
  const [digits, exponent] = number.toExponential(1).split("e");
  const raised = [...String(Number(exponent))].map((digit) => SUPERSCRIPT[digit]).join("");
  return `${digits.replace("-", "−").replace(/\.0$/, "")}·10${raised}`;
}
