// What an assistant contributes so that a group without its virtual members gets the full result:
// full * scale - factor * (sum of the sandbox ranks' inputs), or the quotient for products.
//
// Differences are rounded once, as if in float64. Where one input is subtracted from a full
// result unscaled, single precision gives the same bits (the difference of two values of p bits
// is either exact in 2p + 2 bits, or so lopsided that rounding cannot come out another way), and
// pairs of 8-bit values fit two halves; that is what keeps up with the memory.

#include "elements.cuh"

#ifndef INPUTS
#define INPUTS 1
#endif

#define MODE_DIFFERENCE 0
#define MODE_SCALED 1
#define MODE_QUOTIENT 2
#define MODE_EXCLUSIVE_OR 3
#ifndef MODE
#define MODE MODE_DIFFERENCE
#endif

struct Inputs {
    const Stored* of[8];
};

template <typename Type> struct Exact { typedef double Wide; };
template <> struct Exact<i64> { typedef i64 Wide; };
typedef Exact<Wide>::Wide Exactly;

// Where a sandbox rank multiplies with zero, nothing that others send matters.
template <typename Type>
DEVICE Type quotient(Type value, Type by) {
    return by == 0 ? (Type)1 : by == -1 ? -value : value / by;
}

// One element; `own` are its values in the sandbox ranks' inputs.
DEVICE Stored compensated(Stored full, const Stored* own, double scale, double factor) {
#if MODE == MODE_EXCLUSIVE_OR
#pragma unroll
    for (int input = 0; input < INPUTS; ++input) full ^= own[input];
    return full;
#else
    if (INPUTS == 1 && MODE == MODE_DIFFERENCE)
        return Element::narrow((Wide)(Element::widen(full) - Element::widen(own[0])));
    Exactly value = (Exactly)Element::widen(full);
    if (MODE == MODE_SCALED) value = (Exactly)(value * (Exactly)scale);
#pragma unroll
    for (int input = 0; input < INPUTS; ++input) {
        Exactly one = (Exactly)Element::widen(own[input]);
        if (MODE == MODE_QUOTIENT) value = quotient(value, one);
        else if (MODE == MODE_SCALED) value -= (Exactly)(one * (Exactly)factor);
        else value -= one;
    }
    return Element::narrow((Wide)value);
#endif
}

#if defined(PACKED) && defined(__CUDA_ARCH__)
// Four 8-bit values at once, as two pairs of halves.
#if PACKED == 1 && __CUDA_ARCH__ >= 890
#define HAS_PACKED 1
DEVICE u32 halves(u32 pair) {
    u32 wide;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"((u16)pair));
    return wide;
}
DEVICE u32 pair_of(u32 wide) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pair) : "r"(wide));
    return pair;
}
DEVICE bool has_nan(u32) { return false; }
#elif PACKED == 2
#define HAS_PACKED 1
DEVICE u32 halves(u32 pair) { return __byte_perm(pair, 0, 0x1404); }
DEVICE u32 pair_of(u32 wide) {
    return __byte_perm(wide + 0x007f007fu + (wide >> 8 & 0x00010001u), 0, 0x4431);
}
// Whose rounding would carry into the sign.
DEVICE bool has_nan(u32 wide) { return ((wide & 0x7fff7fffu) + 0x03ff03ffu) & 0x80008000u; }
#endif
#endif

#ifdef HAS_PACKED
DEVICE bool packed_difference(u32 full, u32 own, u32* result) {
    u32 low, high;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(halves(full)), "r"(halves(own)));
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(halves(full >> 16)), "r"(halves(own >> 16)));
    *result = pair_of(low) | pair_of(high) << 16;
    return !has_nan(low) && !has_nan(high);
}
#endif

DEVICE Vector compensated_vector(
    const Vector& full, const Vector* own, double scale, double factor
) {
    Vector result;
#ifdef HAS_PACKED
    if (INPUTS == 1 && MODE == MODE_DIFFERENCE) {
        const uint4 &a = full.all, &b = own[0].all;
        bool fits = packed_difference(a.x, b.x, &result.all.x);
        fits &= packed_difference(a.y, b.y, &result.all.y);
        fits &= packed_difference(a.z, b.z, &result.all.z);
        fits &= packed_difference(a.w, b.w, &result.all.w);
        if (fits) return result;
    }
#endif
#pragma unroll
    for (int place = 0; place < VECTOR; ++place) {
        Stored values[INPUTS];
#pragma unroll
        for (int input = 0; input < INPUTS; ++input) values[input] = own[input].each[place];
        result.each[place] = compensated(full.each[place], values, scale, factor);
    }
    return result;
}

// Elements before the first 16-byte boundary are `head` (the same in all tensors), or all
// elements, where the tensors lie differently. Vectors follow, and what is left.
extern "C" __global__ void __launch_bounds__(256) compensate(
    Stored* result, const Stored* full, const Stored* in0, const Stored* in1, const Stored* in2,
    const Stored* in3, const Stored* in4, const Stored* in5, const Stored* in6, const Stored* in7,
    i64 count, i64 head, double scale, double factor
) {
    const Inputs inputs = {{in0, in1, in2, in3, in4, in5, in6, in7}};
    const i64 threads = (i64)gridDim.x * blockDim.x;
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 vectors = (count - head) / VECTOR;
    const i64 body = vectors * VECTOR;

    const int UNROLL = INPUTS <= 2 ? 4 : 2;
    for (i64 base = (i64)blockIdx.x * blockDim.x * UNROLL; base < vectors;
         base += threads * UNROLL) {
        Vector whole[UNROLL], own[UNROLL][INPUTS];
#pragma unroll
        for (int turn = 0; turn < UNROLL; ++turn) {
            i64 at = base + (i64)turn * blockDim.x + threadIdx.x;
            if (at < vectors) {
                whole[turn].all = ((const uint4*)(full + head))[at];
#pragma unroll
                for (int input = 0; input < INPUTS; ++input)
                    own[turn][input].all = ((const uint4*)(inputs.of[input] + head))[at];
            }
        }
#pragma unroll
        for (int turn = 0; turn < UNROLL; ++turn) {
            i64 at = base + (i64)turn * blockDim.x + threadIdx.x;
            if (at < vectors) {
                Vector one = compensated_vector(whole[turn], own[turn], scale, factor);
                ((uint4*)(result + head))[at] = one.all;
            }
        }
    }
    for (i64 at = thread; at < count - body; at += threads) {
        i64 place = at < head ? at : at + body;
        Stored values[INPUTS];
#pragma unroll
        for (int input = 0; input < INPUTS; ++input) values[input] = inputs.of[input][place];
        result[place] = compensated(full[place], values, scale, factor);
    }
}
