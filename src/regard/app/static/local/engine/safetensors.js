// Reads safetensors files: an 8-byte header length, a JSON header, and the tensors. Values become float32.

const DECODERS = { F32: decodeFloat32, F16: decodeFloat16, BF16: decodeBfloat16 };
const BYTES = { F32: 4, F16: 2, BF16: 2 };

// file: Uint8Array. Returns a Map: name → { shape, data: Float32Array }
export function readSafetensors(file) {
  const bytes = new Uint8Array(file.buffer, file.byteOffset, file.byteLength); // unlike slices of node's Buffer, its slices are copies
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  if (bytes.length < 8) throw new Error(`A safetensors file has at least 8 bytes; this one has ${bytes.length}.`);
  const length = Number(view.getBigUint64(0, true));
  if (8 + length > bytes.length) throw new Error(`The header has ${length} bytes, but the file has only ${bytes.length}. Copy the file again.`);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const start = 8 + length;
  const tensors = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name !== "__metadata__") tensors.set(name, readTensor(name, entry, bytes.subarray(start)));
  }
  return tensors;
}

function readTensor(name, { dtype, shape, data_offsets: [first, last] }, bytes) {
  if (!(dtype in DECODERS)) throw new Error(`${name} has dtype ${dtype}; the supported dtypes are ${Object.keys(DECODERS).join(", ")}.`);
  const size = shape.reduce((product, n) => product * n, 1);
  if (last - first !== size * BYTES[dtype]) throw new Error(`${name} has shape ${shape} and dtype ${dtype}, but ${last - first} bytes.`);
  if (first < 0 || last > bytes.length) throw new Error(`${name} ends at byte ${last}, but the file has ${bytes.length}. Copy the file again.`);
  return { shape, data: DECODERS[dtype](bytes.slice(first, last)) }; // the copy is aligned
}

function decodeFloat32(bytes) {
  return new Float32Array(bytes.buffer);
}

function decodeBfloat16(bytes) {
  const halves = new Uint16Array(bytes.buffer);
  return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
}

function decodeFloat16(bytes) {
  return Float32Array.from(new Uint16Array(bytes.buffer), float16);
}

// float16: sign, 5 bits of exponent, 10 bits of fraction
function float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
