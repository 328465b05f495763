// Random delays where ranks meet, for the stress programs; nothing at all unless built with TT_STRESS_DELAYS.
#pragma once

namespace tt {

#ifdef TT_STRESS_DELAYS
// Sleeps now and then, most often for some microseconds, seldom for some milliseconds. The environment variable
// TT_DELAY_SEED chooses which delays.
void stress_delay();
#else
inline void stress_delay() {}
#endif

}  // namespace tt
