// Numbers as text.

export { formatExact, formatNumber, formatShort } from "../shared/format.js";
