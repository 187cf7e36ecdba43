// Bfloat16Attention: MultiHeadAttention without attention_bias and not causal, in products of bfloat16 numbers: query,
// key and value and the weights of the softmax rounded to bfloat16, sums and the softmax in float32. Query, key, value
// and output are all float32 or all bfloat16. For CPUs with matrix units; others compute the same with vectors.
#pragma once

#include "operators/multi_head_attention/op.h"
