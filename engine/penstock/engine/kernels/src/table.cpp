#include "functions.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace ISA {

extern const Table table;
const Table table = {TEXT(ISA), pack, pack_gguf, compress, linear, experts, lookup, attention, write, norm, rope, best, broken, sample, rank,
                     convolve, delta, space, layers, body, read};

}  // namespace ISA
