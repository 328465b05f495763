#include "runtime/settings.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>

namespace sim {
namespace {

std::string text_of(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

std::int64_t number_of(const char* name, const std::string& text, std::int64_t low, std::int64_t high) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < low || number > high) {
    throw std::invalid_argument(std::string(name) + "=" + text + ": must be a number from " + std::to_string(low) +
                                " to " + std::to_string(high));
  }
  return number;
}

std::vector<int> visible_cards(int cards) {
  std::vector<int> visible;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int card = 0; card < cards; ++card) visible.push_back(card);
    return visible;
  }
  std::string text = list;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = std::min(text.find(',', begin), text.size());
    visible.push_back(
        static_cast<int>(number_of("ASCEND_RT_VISIBLE_DEVICES", text.substr(begin, end - begin), 0, cards - 1)));
    begin = end + 1;
  }
  return visible;
}

Settings read() {
  Settings result;
  result.cards = static_cast<int>(number_of("TT_SIM_NPUS", text_of("TT_SIM_NPUS", "8"), 1, 64));
  result.visible = visible_cards(result.cards);
  result.memory_bytes =
      static_cast<std::size_t>(number_of("TT_SIM_MEMORY_MB", text_of("TT_SIM_MEMORY_MB", "16384"), 4, 1 << 20)) << 20;
  result.soc_name = text_of("TT_SIM_SOC", "Ascend910B2");
  std::string seed = text_of("TT_SIM_DELAY", "");
  if (!seed.empty()) result.delay_seed = number_of("TT_SIM_DELAY", seed, 0, INT64_MAX);
  result.statistics_path = text_of("TT_SIM_STATS", "");
  result.faults = text_of("TT_SIM_FAULT", "");
  std::string checks = text_of("TT_SIM_CHECKS", "abort");
  if (checks != "abort" && checks != "report") {
    throw std::invalid_argument("TT_SIM_CHECKS=" + checks + ": must be abort or report");
  }
  result.report_only = checks == "report";
  return result;
}

}  // namespace

const Settings& settings() {
  static const Settings* instance = std::make_unique<Settings>(read()).release();
  return *instance;
}

int rank() {
  const char* text = std::getenv("RANK");
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace sim
