#include "opapi/operator.h"

namespace sim::opapi {

SIM_CHECKED_OPERATOR(Add, In self, In other, Scalar alpha, Out out) { out.set(at::add(self, other, alpha)); }

}  // namespace sim::opapi
