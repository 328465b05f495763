// Random numbers. The same seed and offset give the same numbers, which are not those of a card.
#include <ATen/CPUGeneratorImpl.h>

#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

// A seed or an offset that is on the card.
uint64_t number(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.reshape({}).item<int64_t>()); }

at::Generator generator(uint64_t seed, uint64_t offset) {
  // Seed and offset are mixed (splitmix64), since neighbouring offsets must give unrelated numbers.
  uint64_t z = seed + (offset + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return at::make_generator<at::CPUGeneratorImpl>(z ^ (z >> 31));
}

at::Tensor standard_normal(at::IntArrayRef sizes, int64_t seed, int64_t offset) {
  return at::empty(sizes, at::kFloat)
      .normal_(0, 1, generator(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)));
}

at::Tensor uniform(at::IntArrayRef sizes, uint64_t seed, uint64_t offset) {
  return at::empty(sizes, at::kFloat).uniform_(0, 1, generator(seed, offset));
}

// Uniform in [from, to) of the type of `like`; the upper end must not be reached by rounding.
at::Tensor uniform_between(const at::Tensor& like, double from, double to, uint64_t seed, uint64_t offset) {
  if (like.scalar_type() == at::kDouble) {
    return at::empty(like.sizes(), at::kDouble).uniform_(from, to, generator(seed, offset));
  }
  return at::empty(like.sizes(), like.scalar_type()).uniform_(from, to, generator(seed, offset));
}

at::Tensor integers(const at::Tensor& like, int64_t from, int64_t to, uint64_t seed, uint64_t offset) {
  require(from < to, "random integers from " + std::to_string(from) + " to " + std::to_string(to));
  return at::randint(from, to, like.sizes(), generator(seed, offset), at::kLong);
}

// The integers that fill the type of `like`, as torch's random_() without limits.
at::Tensor all_integers(const at::Tensor& like, uint64_t seed, uint64_t offset) {
  return at::empty(like.sizes(), like.scalar_type()).random_(generator(seed, offset));
}

// One bit for each element, the lowest bit of a byte first; 1 keeps the element. Both sizes are rounded up to 128 bits.
void drop_mask(const IntArray& shape, double drop, uint64_t seed, uint64_t offset, const Out& out) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  require(drop >= 0 && drop <= 1, "the probability to drop is outside [0, 1]");
  const int64_t bytes = (count + 127) / 128 * 16;
  require(out.numel() >= bytes, "the mask needs " + std::to_string(bytes) + " bytes");
  const at::Tensor keep = uniform({bytes, 8}, seed, offset).ge(drop).to(at::kByte);
  const at::Tensor bits = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  out.reshape({-1}).narrow(0, 0, bytes).copy_((keep * bits).sum(1));
}

at::Tensor unpack(const at::Tensor& mask, int64_t count) {
  const at::Tensor bits = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  const at::Tensor bytes = mask.reshape({-1}).view(at::kByte);
  require(bytes.numel() * 8 >= count,
          "the mask has " + std::to_string(bytes.numel() * 8) + " bits, not " + std::to_string(count));
  return bytes.unsqueeze(1).bitwise_and(bits).ne(0).reshape({-1}).narrow(0, 0, count);
}

}  // namespace

SIM_OPERATOR(InplaceNormal, InOut self, float mean, float deviation, int64_t seed, int64_t offset) {
  self.set(standard_normal(self.sizes(), seed, offset) * deviation + mean);
}
SIM_OPERATOR(InplaceNormalTensor, InOut self, float mean, float deviation, In seed, In offset, int64_t more) {
  self.set(standard_normal(self.sizes(), seed.reshape({}).item<int64_t>(), offset.reshape({}).item<int64_t>() + more) *
               deviation +
           mean);
}
SIM_OPERATOR(NormalFloatFloat, float mean, float deviation, int64_t seed, int64_t offset, Out out) {
  out.set(standard_normal(out.sizes(), seed, offset) * deviation + mean);
}
SIM_OPERATOR(NormalFloatTensor, float mean, In deviation, int64_t seed, int64_t offset, Out out) {
  out.set(standard_normal(out.sizes(), seed, offset) * wide(deviation) + mean);
}
SIM_OPERATOR(NormalTensorFloat, In mean, float deviation, int64_t seed, int64_t offset, Out out) {
  out.set(standard_normal(out.sizes(), seed, offset) * deviation + wide(mean));
}
SIM_OPERATOR(NormalTensorTensor, In mean, In deviation, int64_t seed, int64_t offset, Out out) {
  out.set(standard_normal(out.sizes(), seed, offset) * wide(deviation) + wide(mean));
}
SIM_OPERATOR(InplaceUniform, InOut self, double from, double to, uint64_t seed, uint64_t offset) {
  self.set(uniform_between(self, from, to, seed, offset));
}
SIM_OPERATOR(InplaceUniformTensor, InOut self, double from, double to, In seed, In offset, uint64_t more) {
  self.set(uniform_between(self, from, to, number(seed), number(offset) + more));
}
SIM_OPERATOR(Bernoulli, In /*self*/, Scalar probability, int64_t seed, int64_t offset, Out out) {
  out.set(uniform(out.sizes(), static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)).lt(probability));
}
SIM_OPERATOR(BernoulliTensor, In /*self*/, In probability, int64_t seed, int64_t offset, Out out) {
  out.set(uniform(out.sizes(), static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)).lt(wide(probability)));
}
SIM_OPERATOR(InplaceBernoulli, InOut self, Scalar probability, int64_t seed, int64_t offset) {
  self.set(uniform(self.sizes(), static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)).lt(probability));
}
SIM_OPERATOR(InplaceBernoulliTensor, InOut self, In probability, int64_t seed, int64_t offset) {
  self.set(uniform(self.sizes(), static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)).lt(wide(probability)));
}
SIM_OPERATOR(Randperm, int64_t n, int64_t seed, int64_t offset, Out out) {
  out.set(at::randperm(n, generator(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)), at::kLong));
}
SIM_OPERATOR(InplaceRandom, InOut self, int64_t from, int64_t to, int64_t seed, int64_t offset) {
  self.set(integers(self, from, to, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)));
}
SIM_OPERATOR(InplaceRandomTensor, InOut self, int64_t from, int64_t to, In seed, In offset, int64_t more) {
  self.set(integers(self, from, to, number(seed), number(offset) + static_cast<uint64_t>(more)));
}
SIM_OPERATOR(InplaceRandomWithoutFromTo, InOut self, int64_t seed, int64_t offset) {
  self.set(all_integers(self, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)));
}
SIM_OPERATOR(InplaceRandomWithoutFromToTensor, InOut self, In seed, In offset, int64_t more) {
  self.set(all_integers(self, number(seed), number(offset) + static_cast<uint64_t>(more)));
}
SIM_OPERATOR(Multinomial, In self, int64_t samples, bool replacement, int64_t seed, int64_t offset, Out out) {
  out.set(at::multinomial(wide(self), samples, replacement,
                          generator(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset))));
}
SIM_OPERATOR(MultinomialTensor, In self, int64_t samples, bool replacement, In seed, In offset, int64_t more, Out out) {
  out.set(at::multinomial(wide(self), samples, replacement,
                          generator(number(seed), number(offset) + static_cast<uint64_t>(more))));
}
SIM_OPERATOR(SimThreadExponential, InOut self, int64_t /*count*/, double rate, int64_t seed, int64_t offset) {
  self.set(at::empty(self.sizes(), at::kFloat)
               .exponential_(rate, generator(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset))));
}

SIM_OPERATOR(DropoutGenMask, IntArray shape, double drop, int64_t seed, int64_t offset, Out out) {
  drop_mask(shape, drop, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), out);
}
SIM_OPERATOR(DropoutGenMaskV2, IntArray shape, double drop, int64_t seed, int64_t offset, DType /*type*/, Out out) {
  drop_mask(shape, drop, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset), out);
}
SIM_OPERATOR(DropoutGenMaskV2Tensor, IntArray shape, double drop, In seed, In offset, int64_t more, DType /*type*/,
             Out out) {
  drop_mask(shape, drop, number(seed), number(offset) + static_cast<uint64_t>(more), out);
}
SIM_OPERATOR(DropoutDoMask, In self, In mask, double drop, Out out) {
  const at::Tensor keep = unpack(mask, self.numel()).view(self.sizes());
  out.set(drop < 1 ? wide(self) * keep / (1 - drop) : at::zeros_like(self));
}

}  // namespace sim::opapi
