// Products of matrices. Halves are multiplied in fp32 and rounded once, as a cube unit does.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return at::matmul(wide(a), wide(b)); }

// What the first phase finds wrong with a product of matrices.
void check_factors(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  require(a.scalar_type() == b.scalar_type(), "the factors have different types");
  require(a.dim() >= 1 && b.dim() >= 1, "a factor has no dimension");
  const int64_t rows_of_b = b.dim() == 1 ? b.size(0) : b.size(-2);
  require(a.size(-1) == rows_of_b, "the first factor has " + std::to_string(a.size(-1)) + " columns, the second " +
                                       std::to_string(rows_of_b) + " rows");
  require(b.dim() == 1 || out.size(-1) == b.size(-1), "the output has not as many columns as the second factor");
}

// beta * self + alpha * term
at::Tensor add_scaled(const at::Tensor& self, const at::Scalar& beta, const at::Tensor& term, const at::Scalar& alpha) {
  const at::Tensor scaled = alpha.equal(1) ? term : term * alpha;
  if (beta.equal(0)) return scaled;  // self may hold anything then
  return at::add(scaled, wide(self), beta);
}

}  // namespace

SIM_CHECKED_OPERATOR(Matmul, In self, In other, Out out, int8_t /*cube_math*/) {
  check_factors(self, other, out);
  if (!checking()) out.set(product(self, other));
}
SIM_CHECKED_OPERATOR(Mm, In self, In other, Out out, int8_t /*cube_math*/) {
  check_factors(self, other, out);
  if (!checking()) out.set(product(self, other));
}
SIM_CHECKED_OPERATOR(BatchMatMul, In self, In other, Out out, int8_t /*cube_math*/) {
  check_factors(self, other, out);
  if (!checking()) out.set(product(self, other));
}
SIM_CHECKED_OPERATOR(Mv, In self, In vector, Out out, int8_t /*cube_math*/) {
  check_factors(self, vector, out);
  if (!checking()) out.set(product(self, vector));
}
SIM_OPERATOR(Dot, In self, In other, Out out) { out.set(product(self, other)); }
SIM_CHECKED_OPERATOR(Addmm, In self, In a, In b, Scalar beta, Scalar alpha, Out out, int8_t /*cube_math*/) {
  check_factors(a, b, out);
  if (!checking()) out.set(add_scaled(self, beta, product(a, b), alpha));
}
SIM_CHECKED_OPERATOR(InplaceAddmm, InOut self, In a, In b, Scalar beta, Scalar alpha, int8_t /*cube_math*/) {
  check_factors(a, b, self);
  if (!checking()) self.set(add_scaled(self, beta, product(a, b), alpha));
}
SIM_OPERATOR(Addmv, In self, In a, In b, Scalar alpha, Scalar beta, Out out, int8_t /*cube_math*/) {
  out.set(add_scaled(self, beta, product(a, b), alpha));
}
SIM_CHECKED_OPERATOR(Baddbmm, In self, In a, In b, Scalar beta, Scalar alpha, Out out, int8_t /*cube_math*/) {
  check_factors(a, b, out);
  if (!checking()) out.set(add_scaled(self, beta, product(a, b), alpha));
}
SIM_CHECKED_OPERATOR(InplaceBaddbmm, InOut self, In a, In b, Scalar beta, Scalar alpha, int8_t /*cube_math*/) {
  check_factors(a, b, self);
  if (!checking()) self.set(add_scaled(self, beta, product(a, b), alpha));
}
SIM_OPERATOR(Addbmm, In self, In a, In b, Scalar beta, Scalar alpha, Out out, int8_t /*cube_math*/) {
  out.set(add_scaled(self, beta, product(a, b).sum(0), alpha));
}
SIM_OPERATOR(Addr, In self, In a, In b, Scalar beta, Scalar alpha, Out out) {
  out.set(add_scaled(self, beta, at::outer(wide(a), wide(b)), alpha));
}
SIM_OPERATOR(Ger, In a, In b, Out out) { out.set(at::outer(wide(a), wide(b))); }
SIM_OPERATOR(Einsum, Ins tensors, Text equation, Out out) {
  Ins factors;
  for (const at::Tensor& tensor : tensors) factors.push_back(wide(tensor));
  out.set(at::einsum(equation, factors));
}
SIM_OPERATOR(Cdist, In a, In b, float p, int64_t /*mode*/, Out out) { out.set(at::cdist(wide(a), wide(b), p)); }
SIM_OPERATOR(Inverse, In self, Out out) { out.set(at::linalg_inv(self)); }
SIM_OPERATOR(LinalgCholesky, In self, bool upper, Out out) { out.set(at::linalg_cholesky(self, upper)); }
SIM_OPERATOR(LinalgQr, In self, int64_t mode, Out q, Out r) {
  const auto [orthogonal, triangular] = at::linalg_qr(self, mode == 1 ? "complete" : mode == 2 ? "r" : "reduced");
  q.set(orthogonal);
  r.set(triangular);
}
SIM_OPERATOR(LinalgCross, In self, In other, int64_t dim, Out out) { out.set(at::linalg_cross(self, other, dim)); }

}  // namespace sim::opapi
