// Copy bytes and take their XXH3 (64 bits, seed 0) on the way: each is loaded once, and what is hashed is what was
// stored. A source that changes meanwhile therefore gives a checksum of the copy, whatever the copy holds.
//
// XXH3 of more than 240 bytes: stripes of 64 bytes go into eight sums, sixteen stripes to a block, and after each block
// the sums are stirred. The last 64 bytes are one stripe more, and the sums are folded into one number. Shorter inputs
// have rules of their own; they are copied first and hashed in the copy. Constants are those of the algorithm.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie");

using Byte = uint8_t;
using Word = uint64_t;

constexpr Word k32a = 0x9E3779B1, k32b = 0x85EBCA77, k32c = 0xC2B2AE3D;
constexpr Word k64a = 0x9E3779B185EBCA87, k64b = 0xC2B2AE3D27D4EB4F, k64c = 0x165667B19E3779F9;
constexpr Word k64d = 0x85EBCA77C2B2AE63, k64e = 0x27D4EB2F165667C5;
constexpr Word kMixA = 0x165667919E3779F9, kMixB = 0x9FB21C651E98DF25;

alignas(64) constexpr Byte kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr size_t kStripe = 64, kStripesPerBlock = 16;
constexpr const Byte* kStir = kSecret + 128;       // the part of the secret that stirs after a block
constexpr const Byte* kLastStripe = kSecret + 121;  // the part for the last 64 bytes
constexpr size_t kAhead = 1024;  // how far ahead the source is asked for
// From this length on, what is stored goes past the caches (if it is aligned): such blocks come in numbers that no cache
// holds, and lines that are not read before they are written make the copy faster than memcpy.
constexpr size_t kStreamFrom = 512 * 1024;

Word word(const Byte* at) {
  Word value;
  memcpy(&value, at, sizeof value);
  return value;
}

Word half(const Byte* at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

Word folded_product(Word a, Word b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<Word>(product) ^ static_cast<Word>(product >> 64);
}

Word finish(Word x) {
  x = (x ^ x >> 37) * kMixA;
  return x ^ x >> 32;
}

Word finish_short(Word x) {
  x = (x ^ x >> 33) * k64b;
  x = (x ^ x >> 29) * k64c;
  return x ^ x >> 32;
}

Word turned(Word x, int bits) { return x << bits | x >> (64 - bits); }

// 16 bytes against 16 bytes of the secret.
Word mixed(const Byte* at, size_t secret) {
  return folded_product(word(at) ^ word(kSecret + secret), word(at + 8) ^ word(kSecret + secret + 8));
}

Word hash_up_to_16(const Byte* in, size_t n) {
  if (n > 8) {
    const Word low = word(kSecret + 24) ^ word(kSecret + 32) ^ word(in);
    const Word high = word(kSecret + 40) ^ word(kSecret + 48) ^ word(in + n - 8);
    return finish(n + __builtin_bswap64(low) + high + folded_product(low, high));
  }
  if (n >= 4) {
    Word x = word(kSecret + 8) ^ word(kSecret + 16) ^ (half(in + n - 4) | half(in) << 32);
    x = (x ^ turned(x, 49) ^ turned(x, 24)) * kMixB;
    x = (x ^ ((x >> 35) + n)) * kMixB;
    return x ^ x >> 28;
  }
  if (n == 0) return finish_short(word(kSecret + 56) ^ word(kSecret + 64));
  const Word bytes = in[n - 1] | n << 8 | static_cast<Word>(in[0]) << 16 | static_cast<Word>(in[n / 2]) << 24;
  return finish_short(half(kSecret) ^ half(kSecret + 4) ^ bytes);
}

Word hash_up_to_240(const Byte* in, size_t n) {
  if (n <= 16) return hash_up_to_16(in, n);
  Word sum = n * k64a;
  if (n <= 128) {
    for (size_t i = 0; i <= (n - 1) / 32; i++) {
      sum += mixed(in + 16 * i, 32 * i) + mixed(in + n - 16 * (i + 1), 32 * i + 16);
    }
    return finish(sum);
  }
  for (size_t i = 0; i < 8; i++) sum += mixed(in + 16 * i, 16 * i);
  sum = finish(sum);
  for (size_t i = 8; i < n / 16; i++) sum += mixed(in + 16 * i, 16 * (i - 8) + 3);
  return finish(sum + mixed(in + n - 16, 119));
}

void add_stripe(Word* sums, const Word* stripe, const Byte* secret) {
  for (size_t i = 0; i < 8; i++) {
    const Word keyed = stripe[i] ^ word(secret + 8 * i);
    sums[i ^ 1] += stripe[i];
    sums[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
  }
}

// Each of these copies `stripes` whole stripes and adds them to the eight sums. Those that stream want `into` aligned.
using Stripes = void(Word* sums, Byte* into, const Byte* source, size_t stripes);

void stripes_plain(Word* sums, Byte* into, const Byte* source, size_t stripes) {
  for (size_t i = 0; i < stripes; i++) {
    Word stripe[8];
    memcpy(stripe, source + kStripe * i, kStripe);
    memcpy(into + kStripe * i, stripe, kStripe);
    add_stripe(sums, stripe, kSecret + 8 * (i % kStripesPerBlock));
    if (i % kStripesPerBlock != kStripesPerBlock - 1) continue;
    for (size_t k = 0; k < 8; k++) sums[k] = (sums[k] ^ sums[k] >> 47 ^ word(kStir + 8 * k)) * k32a;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void add_half(__m256i& sum, __m256i x, const Byte* secret) {
  const __m256i keyed = _mm256_xor_si256(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  sum = _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(x, 0x4E)));
}

__attribute__((target("avx2"))) inline __m256i stirred(__m256i sum, const Byte* secret) {
  const __m256i prime = _mm256_set1_epi64x(k32a);
  sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)),
                         _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
  const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
  return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), high);
}

template <bool kStream>
__attribute__((target("avx2"))) void stripes_avx2(Word* sums, Byte* into, const Byte* source, size_t stripes) {
  auto* const kept = reinterpret_cast<__m256i*>(sums);
  __m256i low = _mm256_loadu_si256(kept), high = _mm256_loadu_si256(kept + 1);
  for (size_t i = 0; i < stripes; i++, source += kStripe, into += kStripe) {
    const Byte* const secret = kSecret + 8 * (i % kStripesPerBlock);
    _mm_prefetch(reinterpret_cast<const char*>(source + kAhead), _MM_HINT_T0);
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    auto* const out = reinterpret_cast<__m256i*>(into);
    kStream ? _mm256_stream_si256(out, first) : _mm256_storeu_si256(out, first);
    kStream ? _mm256_stream_si256(out + 1, second) : _mm256_storeu_si256(out + 1, second);
    add_half(low, first, secret);
    add_half(high, second, secret + 32);
    if (i % kStripesPerBlock != kStripesPerBlock - 1) continue;
    low = stirred(low, kStir);
    high = stirred(high, kStir + 32);
  }
  if (kStream) _mm_sfence();
  _mm256_storeu_si256(kept, low);
  _mm256_storeu_si256(kept + 1, high);
}

template <bool kStream>
__attribute__((target("avx512f"))) void stripes_avx512(Word* sums, Byte* into, const Byte* source, size_t stripes) {
  const __m512i prime = _mm512_set1_epi64(k32a), stir = _mm512_loadu_si512(kStir);
  __m512i sum = _mm512_loadu_si512(sums);
  for (size_t i = 0; i < stripes; i++, source += kStripe, into += kStripe) {
    _mm_prefetch(reinterpret_cast<const char*>(source + kAhead), _MM_HINT_T0);
    const __m512i x = _mm512_loadu_si512(source);
    kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(into), x) : _mm512_storeu_si512(into, x);
    const __m512i keyed = _mm512_xor_si512(x, _mm512_loadu_si512(kSecret + 8 * (i % kStripesPerBlock)));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(x, _MM_PERM_BADC)));
    if (i % kStripesPerBlock != kStripesPerBlock - 1) continue;
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), stir);
    const __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
    sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime), high);
  }
  if (kStream) _mm_sfence();
  _mm512_storeu_si512(sums, sum);
}
#endif

struct Variant {
  const char* name;
  Stripes* stripes;
  Stripes* streamed;
  bool here;
};

const Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512", stripes_avx512<false>, stripes_avx512<true>, __builtin_cpu_supports("avx512f") != 0},
    {"avx2", stripes_avx2<false>, stripes_avx2<true>, __builtin_cpu_supports("avx2") != 0},
#endif
    {"plain", stripes_plain, stripes_plain, true},
};

const Variant* chosen = nullptr;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Work on the named instruction set, or the best one for "". Its name, or null if this processor does not have it.
EXPORT const char* penstock_copying_select(const char* name) {
  for (const Variant& variant : kVariants) {
    if (!variant.here || (*name && strcmp(name, variant.name) != 0)) continue;
    chosen = &variant;
    return variant.name;
  }
  return nullptr;
}

// Copy `n` bytes to `into + start`, the next ones of `total`; they do not overlap. All pieces but the last are whole
// blocks of 1024 bytes, and none is empty unless `total` is 0. `sums` is kept between the pieces. After the last one: the
// XXH3 of what `into` holds then.
EXPORT uint64_t penstock_copy_piece(Word* sums, Byte* into, const Byte* source, size_t start, size_t n, size_t total) {
  Byte* const at = into + start;
  const bool is_last = start + n == total;
  if (total <= 240) {
    memcpy(at, source, n);
    return is_last ? hash_up_to_240(into, total) : 0;
  }
  constexpr Word kFirst[8] = {k32c, k64a, k64b, k64c, k64d, k32b, k64e, k32a};
  if (start == 0) memcpy(sums, kFirst, sizeof kFirst);
  const size_t stripes = is_last ? (n - 1) / kStripe : n / kStripe;
  const bool streams = total >= kStreamFrom && reinterpret_cast<uintptr_t>(at) % kStripe == 0;
  (streams ? chosen->streamed : chosen->stripes)(sums, at, source, stripes);
  if (!is_last) return 0;
  memcpy(at + kStripe * stripes, source + kStripe * stripes, n - kStripe * stripes);
  Word last[8];
  memcpy(last, into + total - kStripe, kStripe);
  add_stripe(sums, last, kLastStripe);
  Word result = total * k64a;
  for (size_t i = 0; i < 8; i += 2) {
    const Byte* const secret = kSecret + 11 + 8 * i;
    result += folded_product(sums[i] ^ word(secret), sums[i + 1] ^ word(secret + 8));
  }
  return finish(result);
}

// The same in one piece.
EXPORT uint64_t penstock_copy_hashed(Byte* into, const Byte* source, size_t n) {
  Word sums[8];
  return penstock_copy_piece(sums, into, source, 0, n, n);
}
