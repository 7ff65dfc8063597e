#include "kernels.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace ISA {

void pack(const PackArgs*);
void linear(const LinearArgs*);
void lookup(const LookupArgs*);
void attention(const AttentionArgs*);
void write(const WriteArgs*);
void norm(const NormArgs*);
void rope(const RopeArgs*);
void best(const BestArgs*);
void layer(const LayerArgs*, const StepArgs*, const AttentionArgs*);
uint64_t read(const void*, int64_t);

extern const Table table;
const Table table = {TEXT(ISA), pack, linear, lookup, attention, write, norm, rope, best, layer, read};

}  // namespace ISA
