// The kernels of the instruction set that is being compiled.
#pragma once
#include "kernels.h"

namespace ISA {

void pack(const PackArgs*);
void compress(const CompressArgs*);
void linear(const LinearArgs*);
void lookup(const LookupArgs*);
void attention(const AttentionArgs*);
void write(const WriteArgs*);
void norm(const NormArgs*);
void rope(const RopeArgs*);
void best(const BestArgs*);
void sample(const SampleArgs*);
void rank(const RankArgs*);
void layers(const PagedLayer*, int64_t, const StepArgs*);
uint64_t read(const void*, int64_t);

}  // namespace ISA
