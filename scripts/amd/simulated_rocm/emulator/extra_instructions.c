// Instruction functions that tinygrad's emulator lacks, in the form of its own: a function reads the instruction at the
// program counter, changes the registers, and advances the program counter. WAVE and EXEC come from the command line.
typedef unsigned int u32;
typedef unsigned long u64;

enum { kPc = 256 };  // index of the program counter in the scalar registers

static u64 program_counter(const u32* sgpr) { return sgpr[kPc] | (u64)sgpr[kPc + 1] << 32; }

static void advance(u32* sgpr, u64 bytes) {
  const u64 next = program_counter(sgpr) + bytes;
  sgpr[kPc] = (u32)next;
  sgpr[kPc + 1] = (u32)(next >> 32);
}

// Cache control of 8 and of 12 bytes: memory here has no caches.
void cache_control_8(u32* sgpr) { advance(sgpr, 8); }
void cache_control_12(u32* sgpr) { advance(sgpr, 12); }

// Source lane of ds_swizzle_b32 for a lane. The offset selects one of four modes.
static u32 swizzle_source(u32 offset, u32 lane) {
  const u32 group = lane & ~31u;
  if (offset >= 0xe000) {  // FFT
    const u32 mask = offset & 31;
    u32 reversed = 0;
    for (u32 i = 0; i < 5; ++i) reversed |= (lane >> i & 1) << (4 - i);
    return (reversed >> __builtin_popcount(mask)) | (lane & mask) | group;
  }
  if (offset >= 0xc000) {  // rotation
    const u32 distance = offset >> 5 & 31, mask = offset & 31;
    const u32 rotated = offset >> 10 & 1 ? lane - distance : lane + distance;
    return group | (lane & mask) | (rotated & ~mask & 31);
  }
  if (offset & 0x8000) return (lane & ~3u) | (offset >> 2 * (lane & 3) & 3);  // permutation of four lanes
  return group | ((((lane & offset) | (offset >> 5)) ^ (offset >> 10)) & 31);
}

static u64 active_lanes(const u32* sgpr) { return sgpr[EXEC] | (WAVE == 64 ? (u64)sgpr[EXEC + 1] << 32 : 0); }

void ds_swizzle_b32(u32* sgpr, u32* vgpr) {
  const u32* words = (const u32*)program_counter(sgpr);
  const u32 offset = words[0] & 0xffff, from = words[1] & 255, to = words[1] >> 24;
  const u64 exec = active_lanes(sgpr);
  u32 result[WAVE];
  for (u32 lane = 0; lane < WAVE; ++lane) {
    const u32 source = swizzle_source(offset, lane);
    result[lane] = exec >> source & 1 ? vgpr[from * WAVE + source] : 0;
  }
  for (u32 lane = 0; lane < WAVE; ++lane)
    if (exec >> lane & 1) vgpr[to * WAVE + lane] = result[lane];
  advance(sgpr, 8);
}

// The emulator divides addresses as signed numbers, also those of inactive lanes: negative ones give registers outside
// its array. Here high bits of an address are ignored. `data` is `vgpr`, or the accumulation registers.
typedef enum { kPull, kPullInactive, kPush } Permutation;

static void permute(u32* sgpr, const u32* vgpr, u32* data, Permutation permutation) {
  const u32* words = (const u32*)program_counter(sgpr);
  const u32 *addresses = vgpr + (words[1] & 255) * WAVE, *source = data + (words[1] >> 8 & 255) * WAVE;
  u32* destination = data + (words[1] >> 24) * WAVE;
  const u64 exec = active_lanes(sgpr);
  u32 result[WAVE] = {0};
  for (u32 lane = 0; lane < WAVE; ++lane) {
    if ((exec >> lane & 1) == 0) continue;
    const u32 other = (addresses[lane] + (words[0] & 0xffff)) / 4 % WAVE;
    if (permutation == kPush)
      result[other] = source[lane];
    else if (permutation == kPullInactive || (exec >> other & 1) != 0)
      result[lane] = source[other];
  }
  for (u32 lane = 0; lane < WAVE; ++lane)
    if ((exec >> lane & 1) != 0) destination[lane] = result[lane];
  advance(sgpr, 8);
}

void ds_permute_b32(u32* sgpr, u32* vgpr, u32* data) { permute(sgpr, vgpr, data, kPush); }
void ds_bpermute_b32(u32* sgpr, u32* vgpr, u32* data) { permute(sgpr, vgpr, data, kPull); }
void ds_bpermute_fi_b32(u32* sgpr, u32* vgpr, u32* data) { permute(sgpr, vgpr, data, kPullInactive); }

// Loads from LDS to one half of a register, which keep the other half. The emulator writes the whole register.
#define LOAD_HALF(name, type, shift)                                                        \
  void name(u32* sgpr, const u32* vgpr, u32* data, const unsigned char* lds) {              \
    const u32* words = (const u32*)program_counter(sgpr);                                   \
    const u32* addresses = vgpr + (words[1] & 255) * WAVE;                                  \
    u32* destination = data + (words[1] >> 24) * WAVE;                                      \
    const u64 exec = active_lanes(sgpr);                                                    \
    for (u32 lane = 0; lane < WAVE; ++lane) {                                               \
      if ((exec >> lane & 1) == 0) continue;                                                \
      type value;                                                                           \
      __builtin_memcpy(&value, lds + addresses[lane] + (words[0] & 0xffff), sizeof(value)); \
      const u32 other = destination[lane] & 0xffff0000u >> shift;                           \
      destination[lane] = other | (u32)(unsigned short)value << shift;                      \
    }                                                                                       \
    advance(sgpr, 8);                                                                       \
  }
LOAD_HALF(ds_load_u8_d16, unsigned char, 0)
LOAD_HALF(ds_load_u8_d16_hi, unsigned char, 16)
LOAD_HALF(ds_load_i8_d16, signed char, 0)
LOAD_HALF(ds_load_i8_d16_hi, signed char, 16)
LOAD_HALF(ds_load_u16_d16, unsigned short, 0)
LOAD_HALF(ds_load_u16_d16_hi, unsigned short, 16)
