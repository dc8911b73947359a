// Types of tensor elements: how they are stored, and in which type they are added.
//
// A compilation serves one element type and one reduction: ELEMENT names the type, REDUCTION one
// of REDUCE_*. Conversions are written out, so that the file needs no header of CUDA's and gives
// the same bits on every architecture and, for tests, on the host.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define REDUCE_SUM 0
#define REDUCE_PRODUCT 1
#define REDUCE_MAX 2
#define REDUCE_MIN 3
#define REDUCE_AND 4
#define REDUCE_OR 5
#define REDUCE_XOR 6

#define DEVICE static __device__ __forceinline__

DEVICE u32 bits_of(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
#endif
}

DEVICE float float_of(u32 bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
#endif
}

DEVICE float float_of_half(u16 bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    _Float16 value;
    __builtin_memcpy(&value, &bits, 2);
    return (float)value;
#endif
}

DEVICE u16 half_of_float(float value) {
#ifdef __CUDA_ARCH__
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    _Float16 half = (_Float16)value;
    u16 bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
#endif
}

// Rounds to nearest even into 8 bits with MANTISSA bits after the point. What is larger than
// LARGEST becomes BEYOND: infinity where the type has one, else the largest value, as newer
// versions of torch and the hardware have it.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 BEYOND>
DEVICE u8 narrow_to_8_bits(float value) {
    u32 all = bits_of(value), magnitude = all & 0x7fffffffu;
    u8 sign = (u8)(all >> 24 & 0x80u);
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    u32 narrow;
    if (magnitude < (u32)(127 - BIAS + 1) << 23) {
        // Below the smallest normal number: an addition whose last place is the smallest step.
        const u32 magic = (u32)(127 + 23 - (BIAS - 1 + MANTISSA)) << 23;
        narrow = bits_of(float_of(magnitude) + float_of(magic)) - magic;
    } else {
        const int shift = 23 - MANTISSA;
        u32 odd = magnitude >> shift & 1u;
        narrow = (magnitude - ((u32)(127 - BIAS) << 23) + (1u << (shift - 1)) - 1u + odd) >> shift;
    }
    return sign | (u8)(narrow > LARGEST ? BEYOND : narrow);
}

struct element_f64 {
    typedef double Stored;
    typedef double Wide;
    DEVICE Wide widen(Stored value) { return value; }
    DEVICE Stored narrow(Wide value) { return value; }
};

struct element_f32 {
    typedef float Stored;
    typedef float Wide;
    DEVICE Wide widen(Stored value) { return value; }
    DEVICE Stored narrow(Wide value) { return value; }
};

struct element_f16 {
    typedef u16 Stored;
    typedef float Wide;
    DEVICE Wide widen(Stored value) { return float_of_half(value); }
    DEVICE Stored narrow(Wide value) { return half_of_float(value); }
};

struct element_bf16 {
    typedef u16 Stored;
    typedef float Wide;
    DEVICE Wide widen(Stored value) { return float_of((u32)value << 16); }
    DEVICE Stored narrow(Wide value) {
        u32 all = bits_of(value);
        if ((all & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
        return (u16)((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
    }
};

struct element_f8_e4m3 {
    typedef u8 Stored;
    typedef float Wide;
    DEVICE Wide widen(Stored value) {
        u32 magnitude = value & 0x7fu;
        // The bits are a float's that is 2^120 times too small; denormal ones, too.
        float wide = float_of(magnitude << 20) * float_of(0x7b800000u);
        if (magnitude == 0x7fu) wide = float_of(0x7fc00000u);
        return float_of(bits_of(wide) | (u32)(value & 0x80u) << 24);
    }
    DEVICE Stored narrow(Wide value) { return narrow_to_8_bits<3, 7, 0x7e, 0x7e>(value); }
};

struct element_f8_e5m2 {
    typedef u8 Stored;
    typedef float Wide;
    // The upper byte of a half.
    DEVICE Wide widen(Stored value) { return float_of_half((u16)(value << 8)); }
    DEVICE Stored narrow(Wide value) { return narrow_to_8_bits<2, 15, 0x7b, 0x7c>(value); }
};

#define INTEGER_ELEMENT(NAME, TYPE)                                   \
    struct element_##NAME {                                           \
        typedef TYPE Stored;                                          \
        typedef i64 Wide;                                             \
        DEVICE Wide widen(Stored value) { return (Wide)value; }       \
        DEVICE Stored narrow(Wide value) { return (Stored)value; }    \
    };
INTEGER_ELEMENT(i8, i8)
INTEGER_ELEMENT(u8, u8)
INTEGER_ELEMENT(i16, i16)
INTEGER_ELEMENT(i32, i32)
INTEGER_ELEMENT(i64, i64)

#define JOINED_(one, other) one##other
#define JOINED(one, other) JOINED_(one, other)
typedef JOINED(element_, ELEMENT) Element;
typedef Element::Stored Stored;
typedef Element::Wide Wide;

// Elements that one 16-byte access moves.
static const int VECTOR = 16 / (int)sizeof(Stored);

union Vector {
    uint4 all;
    Stored each[VECTOR];
};
