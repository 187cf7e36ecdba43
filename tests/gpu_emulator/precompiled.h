// What most kernels and their plans include: tests/support/emulation.py has it read once for each device.
#include <algorithm>

#include "common/gpu.h"
#include "common/reduce.h"
#include "common/tunable.h"
