// The random numbers of torch.Generator on the CPU: MT19937 (Matsumoto and Nishimura 1998) and Box-Muller.

const [SIZE, SHIFT] = [624, 397];
const BLOCK = 16; // torch draws normal numbers in blocks of 16

export class Generator {
  constructor(seed) {
    this.state = new Uint32Array(SIZE);
    this.state[0] = seed;
    for (let i = 1; i < SIZE; i += 1) {
      const previous = this.state[i - 1] ^ (this.state[i - 1] >>> 30);
      this.state[i] = Math.imul(1812433253, previous) + i;
    }
    this.at = SIZE;
  }

  // 32 random bits
  next() {
    if (this.at === SIZE) this.refill();
    let x = this.state[this.at];
    this.at += 1;
    x ^= x >>> 11;
    x ^= (x << 7) & 0x9d2c5680;
    x ^= (x << 15) & 0xefc60000;
    return (x ^ (x >>> 18)) >>> 0;
  }

  refill() {
    const { state } = this;
    for (let i = 0; i < SIZE; i += 1) {
      const x = (state[i] & 0x80000000) | (state[(i + 1) % SIZE] & 0x7fffffff);
      state[i] = state[(i + SHIFT) % SIZE] ^ (x >>> 1) ^ (x & 1 ? 0x9908b0df : 0);
    }
    this.at = 0;
  }

  uniform32() {
    return (this.next() & 0xffffff) * 2 ** -24;
  }

  uniform64() {
    const high = this.next();
    return ((high & 0x1fffff) * 2 ** 32 + this.next()) * 2 ** -53;
  }

  // Like tensor.normal_(0, std) for at least 16 numbers. single: use float32 instead of float64
  normal(size, std = 1, single = false) {
    const draw = () => (single ? this.uniform32() : this.uniform64());
    const values = Float64Array.from({ length: size }, draw);
    for (let start = 0; start + BLOCK <= size; start += BLOCK) boxMuller(values.subarray(start, start + BLOCK), std);
    if (size % BLOCK) {
      const last = values.subarray(size - BLOCK);
      last.set(Array.from({ length: BLOCK }, draw));
      boxMuller(last, std);
    }
    return values;
  }
}

// Turns 16 uniform numbers into normal ones
function boxMuller(values, std) {
  const half = BLOCK / 2;
  for (let i = 0; i < half; i += 1) {
    const radius = std * Math.sqrt(-2 * Math.log(1 - values[i]));
    const angle = 2 * Math.PI * values[i + half];
    values[i] = radius * Math.cos(angle);
    values[i + half] = radius * Math.sin(angle);
  }
}
