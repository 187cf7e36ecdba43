// Bfloat16Attention: MultiHeadAttention without attention_bias and not causal, with bfloat16 GEMMs: query, key, value
// and the softmax weights are rounded to bfloat16; sums and the softmax are float32. Query, key, value and output are
// all float32 or all bfloat16. For CPUs with AMX; others compute the same with vectors.
#pragma once

#include "operators/multi_head_attention/op.h"
