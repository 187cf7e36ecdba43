// Kernels of test_simulated_hip.py, compiled by clang without HIP's headers.
#define KERNEL __attribute__((amdgpu_kernel)) __attribute__((visibility("protected")))
#define GLOBAL __attribute__((address_space(1)))
#define LDS __attribute__((address_space(3)))

static unsigned thread_index(void) {
  return __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x();
}

// x[i] += value, for i below count.
KERNEL void add(GLOBAL float* x, float value, unsigned count) {
  const unsigned i = thread_index();
  if (i < count) x[i] += value;
}

// Each block of 64 threads reverses its elements through LDS.
KERNEL void reverse(GLOBAL unsigned* x) {
  static LDS __attribute__((loader_uninitialized)) unsigned shared[256];
  const unsigned lane = __builtin_amdgcn_workitem_id_x(), size = __builtin_amdgcn_workgroup_size_x();
  shared[lane] = x[thread_index()];
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  x[thread_index()] = shared[size - 1 - lane];
}

// Block i adds 1 to each of its halves, which share words with those of its neighbors, a number of times.
KERNEL void count_in_halves(GLOBAL unsigned short* x, unsigned times) {
  for (unsigned i = 0; i < times; ++i) {
    const unsigned short value = __atomic_load_n(&x[__builtin_amdgcn_workgroup_id_x()], __ATOMIC_RELAXED);
    __atomic_store_n(&x[__builtin_amdgcn_workgroup_id_x()], (unsigned short)(value + 1), __ATOMIC_RELAXED);
  }
}

KERNEL void add_atomically(GLOBAL unsigned* sum) { __atomic_fetch_add(sum, 1u, __ATOMIC_RELAXED); }

// Permutations of the values 100, 101, ... of a wave's lanes.
KERNEL void permute_lanes(GLOBAL int* out) {
  const int lane = __builtin_amdgcn_workitem_id_x(), value = 100 + lane;
  out[lane] = __builtin_amdgcn_ds_bpermute(4 * lane + 4, value);
  out[64 + lane] = __builtin_amdgcn_ds_bpermute(4 * lane - 256, value);
  out[128 + lane] = __builtin_amdgcn_ds_permute(4 * lane + 4, value);
  out[192 + lane] = __builtin_amdgcn_ds_permute(4 * lane - 256, value);
#ifdef __gfx942__
  asm volatile(
      "v_accvgpr_write_b32 a0, %1\n s_nop 1\n ds_bpermute_b32 a1, %2, a0\n s_waitcnt lgkmcnt(0)\n"
      "v_accvgpr_read_b32 %0, a1"
      : "=v"(out[256 + lane])
      : "v"(value), "v"(4 * lane + 4)
      : "a0", "a1");
#else
  out[256 + lane] = __builtin_amdgcn_ds_bpermute(4 * lane + 4, value);
#endif
}

#if defined(__GFX11__) || defined(__GFX12__)
#define DS_LOAD "ds_load_"
#else
#define DS_LOAD "ds_read_"
#endif
#ifdef __GFX12__
#define WAIT "\n s_wait_dscnt 0"
#else
#define WAIT "\n s_waitcnt lgkmcnt(0)"
#endif
// Loads of parts of words[lane] from LDS to one half of out[0][lane], out[1][lane], ..., which keep the other half.
KERNEL void load_to_halves(GLOBAL unsigned* out, GLOBAL const unsigned* words) {
  static LDS __attribute__((loader_uninitialized)) unsigned shared[32];
  const unsigned lane = __builtin_amdgcn_workitem_id_x();
  *(volatile LDS unsigned*)&shared[lane] = words[lane];
  const unsigned address = (unsigned)&shared[lane];
  asm volatile(DS_LOAD "u16_d16 %0, %1" WAIT : "+v"(out[lane]) : "v"(address) : "memory");
  asm volatile(DS_LOAD "u16_d16_hi %0, %1 offset:2" WAIT : "+v"(out[32 + lane]) : "v"(address) : "memory");
  asm volatile(DS_LOAD "u8_d16_hi %0, %1 offset:3" WAIT : "+v"(out[64 + lane]) : "v"(address) : "memory");
  asm volatile(DS_LOAD "i8_d16 %0, %1 offset:1" WAIT : "+v"(out[96 + lane]) : "v"(address) : "memory");
}

// out[i] is the two bytes from bytes[i] on, loaded at once where the compiler finds this faster.
KERNEL void load_halves(GLOBAL unsigned* out, GLOBAL const unsigned char* bytes) {
  struct __attribute__((packed)) Half {
    unsigned short value;
  };
  const unsigned lane = __builtin_amdgcn_workitem_id_x();
  out[lane] = ((GLOBAL const struct Half*)(bytes + lane))->value;
}

#if defined(__gfx942__) || defined(__gfx1201__)
// out[16][16] = x[16][16] times the transposed y[16][16], of float8 numbers. One wave.
KERNEL void multiply_float8(GLOBAL float* out, GLOBAL const unsigned char* x, GLOBAL const unsigned char* y) {
  const unsigned lane = __builtin_amdgcn_workitem_id_x(), at = lane % 16 * 16 + lane / 16 * 8;
#ifdef __gfx942__  // 32 numbers of each row: lanes 32 and on have zeros
  typedef float Sums __attribute__((ext_vector_type(4)));
  const long left = lane < 32 ? *(GLOBAL const long*)(x + at) : 0,
             right = lane < 32 ? *(GLOBAL const long*)(y + at) : 0;
  const Sums sums = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(left, right, (Sums)(0), 0, 0, 0);
#else
  typedef float Sums __attribute__((ext_vector_type(8)));
  typedef int Eight __attribute__((ext_vector_type(2)));
  const Eight left = *(GLOBAL const Eight*)(x + at), right = *(GLOBAL const Eight*)(y + at);
  const Sums sums = __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(left, right, (Sums)(0));
#endif
  const unsigned size = sizeof(sums) / sizeof(float);
  for (unsigned i = 0; i < size; ++i) out[(lane / 16 * size + i) * 16 + lane % 16] = sums[i];
}
#endif

#ifdef __gfx1100__
// out[i] += x of lane 5 of the lane's 16 times that of the lane, in two forms: halves and floats.
KERNEL void share_rows(GLOBAL float* out, GLOBAL const unsigned* halves, GLOBAL const float* x) {
  const unsigned lane = __builtin_amdgcn_workitem_id_x();
  float dot = out[lane], product = out[32 + lane];
  asm("v_dot2acc_f32_f16_dpp %0, %1, %1 row_share:5 row_mask:0xf bank_mask:0xf" : "+v"(dot) : "v"(halves[lane]));
  asm("v_fmac_f32_dpp %0, %1, %1 row_share:5 row_mask:0xf bank_mask:0xf" : "+v"(product) : "v"(x[lane]));
  out[lane] = dot;
  out[32 + lane] = product;
}
#endif

#ifdef __gfx942__
// out[i] is the result of an instruction with a half x and the constant 1.0.
// The compiler itself does not use v200.
KERNEL void compute_halves(GLOBAL float* out, _Float16 x) {
  _Float16 y;
  unsigned long less;
  asm volatile("v_add_f16_e32 %0, 1.0, %1" : "=v"(y) : "v"(x));
  out[0] = y;
  asm volatile("v_sub_f16_e32 %0, 1.0, %1" : "=v"(y) : "v"(x));
  out[1] = y;
  asm volatile("v_rcp_f16_e32 %0, -2.0" : "=v"(y));
  out[2] = y;
  asm volatile("v_cmp_gt_f16_e32 vcc, 1.0, %1\n s_mov_b64 %0, vcc" : "=s"(less) : "v"(x) : "vcc");
  out[3] = less & 1;
  asm volatile("v_cvt_f16_f32_e32 %0, 1.0" : "=v"(y));
  out[4] = y;
  asm volatile("v_mov_b32_e32 v200, %1\n v_add_f16_e32 %0, 1.0, v200" : "=v"(y) : "v"(x));
  out[5] = y;
  asm volatile("v_mov_b32_e32 v200, %1\n v_add_f16_e32 %0, 0x3800, v200" : "=v"(y) : "v"(x));
  out[6] = y;
}

// Each lane's number through row_bcast:15 and row_bcast:31; -1 in rows that receive none.
KERNEL void broadcast_rows(GLOBAL int* out) {
  const int lane = __builtin_amdgcn_workitem_id_x();
  out[lane] = __builtin_amdgcn_update_dpp(-1, lane, 0x142, 15, 15, 0);
  out[64 + lane] = __builtin_amdgcn_update_dpp(-1, lane, 0x143, 15, 15, 0);
}

// out[i] is the result of an instruction with operands of 64 bits, in[0] and in[1].
KERNEL void compute_64_bits(GLOBAL unsigned long* out, GLOBAL const unsigned long* in) {
  unsigned long x = in[thread_index()], y = in[thread_index() + 1], z;
  asm volatile("v_mov_b64_e32 %0, %1" : "=v"(z) : "v"(x));
  out[0] = z;
  asm volatile("v_lshl_add_u64 %0, %1, 1, %2" : "=v"(z) : "v"(x), "v"(y));
  out[1] = z;
  z = x;
  asm volatile("v_lshl_add_u64 %0, %0, 1, %1" : "+v"(z) : "v"(y));
  out[2] = z;
  z = y;
  asm volatile("v_lshl_add_u64 %0, %1, 3, %0" : "+v"(z) : "v"(x));
  out[3] = z;
  z = x;
  asm volatile("v_ashrrev_i64 %0, 29, %0" : "+v"(z));
  out[4] = z;
  z = x;
  asm volatile("v_lshlrev_b64 %0, 3, %0" : "+v"(z));
  out[5] = z;
  z = x;
  asm volatile("v_mad_u64_u32 %0, s[0:1], %1, %2, %0" : "+v"(z) : "v"((unsigned)y), "s"(5) : "s0", "s1");
  out[6] = z;
  asm volatile("v_lshl_add_u64 %0, %1, 0, %2" : "=v"(z) : "s"(in), "v"(y));
  out[7] = z - (unsigned long)in;
  // in a FLAT instruction the field of a scalar address is 0
  asm volatile("s_mov_b32 s0, 64\n s_mov_b32 s1, 0\n flat_load_dwordx2 %0, %1\n s_waitcnt vmcnt(0) lgkmcnt(0)"
               : "=v"(z)
               : "v"(in)
               : "s0", "s1");
  out[8] = z;
}
#endif
