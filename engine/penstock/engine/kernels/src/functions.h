// The kernels of the instruction set that is being compiled.
#pragma once
#include "kernels.h"

namespace ISA {

void pack(const PackArgs*);
void pack_gguf(const PackGgufArgs*);
void compress(const CompressArgs*);
void linear(const LinearArgs*);
void experts(const ExpertsArgs*);
void lookup(const LookupArgs*);
void attention(const AttentionArgs*);
void write(const WriteArgs*);
void norm(const NormArgs*);
void rope(const RopeArgs*);
void best(const RowsArgs*);
void broken(const RowsArgs*);
void sample(const SampleArgs*);
void rank(const RankArgs*);
void convolve(const ConvolveArgs*);
void delta(const DeltaArgs*);
void space(const SpaceArgs*);
void layers(const PagedLayer*, int64_t, const StepArgs*);
void body(const NativeModelArgs*, const StepArgs*);
uint64_t read(const void*, int64_t);

// Several linear layers of one shape and form, each with rows of its own; none has more than one part.
void linears(const LinearArgs* each, int count);
// Some panels of a group as a group of their own.
Packed panels_of(const Packed& all, int64_t first, int64_t count);

}  // namespace ISA
