// The core's spans as ranges of torch's profiler.
#pragma once

namespace tt {

// Once, when the module is loaded.
void install_profiler_spans();

}  // namespace tt
