// Element-wise reductions, in the element type: the result is rounded after every step, in rank order, as a ring that
// sends partial sums in the wire type does. Every rank gets the same bits.
#pragma once

#include <cstddef>

#include "abi/hccl.h"

namespace sim::hccl {

// 0 for what is no data type.
std::size_t element_bytes(HcclDataType type);
const char* type_name(HcclDataType type);
const char* op_name(HcclReduceOp op);

// The documented table of Atlas A2 / A3: int8/16/32/64, fp16, fp32, bf16; no products of int16 and bf16.
bool can_reduce(HcclDataType type, HcclReduceOp op);

// accumulator = op(accumulator, source). A NaN on either side of max and min stays.
void reduce_into(void* accumulator, const void* source, std::size_t count, HcclDataType type, HcclReduceOp op);

}  // namespace sim::hccl
