// Counts of API calls, and the report that SIMULATED_HIP_REPORT asks for.
#pragma once

namespace simulated {

void count_call(const char* function);

// Writes the report as JSON to SIMULATED_HIP_REPORT, with %p in its name replaced by the process id.
void write_report();

}  // namespace simulated
