// The whole engine without torch: threads as ranks run the same random steps over shared memory, with gradients in any
// order, some missing, units nested, repeated and left out, backward passes given up; every gathered value and every
// gradient is compared with what it must be. For the sanitizers, and with random delays (TT_STRESS_DELAYS) for what
// only a late rank would show: a place or slot that is written while somebody still reads it. Exit status 0: all were
// right.
//
//   engine_stress [ranks=4] [steps=100] [seed=1]
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "fsdp/engine.h"
#include "host/host_device.h"
#include "threads_as_ranks.h"

namespace {

using tt::DType;
using tt::fsdp::Engine;
using tt::fsdp::ParamSpec;
using tt::fsdp::Schedule;
using tt::fsdp::ShardPlan;
using tt::fsdp::UnitSpec;
using tt::host::HostDevice;
using tt::host::ShmCommunicator;
using tt::host::ShmOptions;
using tt::test::expect;
using tt::test::in_threads;
using tt::test::SharedSource;
using Random = std::minstd_rand;

constexpr std::int32_t kUnits = 6;

std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }
std::uint32_t below(Random& random, std::uint32_t end) { return static_cast<std::uint32_t>(random() >> 8) % end; }

// All values are small whole numbers, exact in bfloat16, and so are their sums: the order of additions does not show.
float master_value(std::int32_t bucket, std::size_t element, std::uint64_t version) {
  return static_cast<float>((at(bucket) * 31 + element * 7 + version * 13) % 128);
}
float gradient_value(std::int32_t param, std::size_t element, int rank, std::uint64_t round) {
  return static_cast<float>((at(param) * 5 + element * 3 + at(rank) * 7 + round) % 16);
}
bool gradient_exists(std::int32_t param, int rank, std::uint64_t round) {
  return (at(param) * 7 + at(rank) * 3 + round) % 5 != 0;
}

// The same for all ranks.
std::unique_ptr<ShardPlan> make_plan(int ranks, unsigned seed) {
  Random random(seed);
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (std::int32_t u = 0; u < kUnits; ++u) {
    UnitSpec unit{tt::str("u", u), {}};
    const std::uint32_t count = 1 + below(random, 5);
    for (std::uint32_t i = 0; i < count; ++i) {
      ParamSpec param;
      param.name = unit.name + ".p" + std::to_string(i);
      param.rows = below(random, 12);  // 0 is legal
      param.row_numel = 1 + below(random, 40);
      param.param_dtype = below(random, 3) == 0 ? DType::kBFloat16 : DType::kFloat32;
      param.requires_grad = below(random, 5) != 0;
      unit.params.push_back(static_cast<std::int32_t>(params.size()));
      params.push_back(param);
    }
    units.push_back(unit);
  }
  const auto cap = below(random, 2) == 0 ? std::optional<std::int64_t>() : std::optional<std::int64_t>(1024);
  return std::make_unique<ShardPlan>(params, units, ranks, cap);
}

// Stands for torch: keeps shards and gradients, and knows where buckets are seated.
class Client final : public tt::fsdp::EngineClient {
 public:
  Client(const ShardPlan& plan, int rank)
      : plan_(plan), rank_(rank), present_(plan.params().size(), false), will_report_(present_) {
    for (const auto& bucket : plan.buckets()) {
      masters_.emplace_back(at(static_cast<std::int32_t>(bucket.shard_numel)), 0.0F);
      gradients_.emplace_back(at(static_cast<std::int32_t>(bucket.shard_numel)), -1.0F);
      seats_.push_back(nullptr);
    }
    update(0);
  }

  void update(std::uint64_t version) {
    version_ = version;
    for (std::size_t b = 0; b < masters_.size(); ++b) {
      const std::size_t shard = masters_[b].size();
      for (std::size_t i = 0; i < shard; ++i) {
        masters_[b][i] = master_value(static_cast<std::int32_t>(b), at(rank_) * shard + i, version);
      }
    }
  }

  void check_gathered(std::int32_t unit) const {
    for (const std::int32_t b : plan_.unit_buckets()[at(unit)]) {
      const std::byte* where = seats_[at(b)];
      expect(where != nullptr, "bucket " + std::to_string(b) + " is not seated");
      const bool narrow = plan_.buckets()[at(b)].param_dtype == DType::kBFloat16;
      for (std::size_t i = 0; i < static_cast<std::size_t>(plan_.bucket_numel(b)); ++i) {
        float value = 0;
        if (narrow) {
          std::uint16_t bits = 0;
          std::memcpy(&bits, where + 2 * i, 2);
          value = std::bit_cast<float>(std::uint32_t{bits} << 16);
        } else {
          std::memcpy(&value, where + 4 * i, 4);
        }
        expect(value == master_value(b, i, version_), "gathered value of bucket " + std::to_string(b));
      }
    }
  }

  float gradient(std::int32_t param, std::size_t element_of_piece) const {
    const auto piece = plan_.piece(param, rank_);
    return gradients_[at(plan_.placement(param).bucket)]
                     [static_cast<std::size_t>(piece.shard_offset) + element_of_piece];
  }
  // What autograd knows when a backward begins, as a rule.
  void expect_gradients(std::uint64_t round, bool known) {
    for (std::size_t p = 0; p < will_report_.size(); ++p) {
      will_report_[p] = !known || gradient_exists(static_cast<std::int32_t>(p), rank_, round);
    }
  }
  bool present(std::int32_t param) const { return present_[at(param)]; }
  void drop_gradients() { std::fill(present_.begin(), present_.end(), false); }

  // EngineClient
  void seat(std::int32_t bucket, std::byte* where) override { seats_[at(bucket)] = where; }
  void unseat(std::int32_t bucket) override { seats_[at(bucket)] = nullptr; }
  void expose(std::int32_t, bool) override {}
  const std::byte* master_shard(std::int32_t bucket) override {
    return reinterpret_cast<const std::byte*>(masters_[at(bucket)].data());
  }
  std::byte* gradient_shard(std::int32_t bucket) override {
    return reinterpret_cast<std::byte*>(gradients_[at(bucket)].data());
  }
  bool has_gradient(std::int32_t param) override { return present_[at(param)]; }
  bool will_report(std::int32_t param) override { return will_report_[at(param)]; }
  void gradient_written(std::int32_t param) override { present_[at(param)] = true; }
  std::byte* allocate(std::size_t bytes) override {
    extra_.push_back(std::make_unique<std::byte[]>(bytes));
    return extra_.back().get();
  }
  void backward_began() override {}
  void log(const std::string&) override {}

 private:
  const ShardPlan& plan_;
  int rank_;
  std::uint64_t version_ = 0;
  std::vector<std::vector<float>> masters_, gradients_;  // per bucket, (S,)
  std::vector<std::byte*> seats_;
  std::vector<bool> present_;
  std::vector<bool> will_report_;
  std::vector<std::unique_ptr<std::byte[]>> extra_;
};

// What the gradients must be: of all ranks before the reduction, and summed.
class Ledger {
 public:
  Ledger(const ShardPlan& plan, int ranks) : plan_(plan), ranks_(ranks), total_(plan.params().size()) {
    held_.assign(at(ranks), std::vector<std::vector<float>>(plan.params().size()));
  }

  void add(std::int32_t param, std::uint64_t round) {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!gradient_exists(param, rank, round)) continue;
      auto& held = held_[at(rank)][at(param)];
      held.resize(numel(param), 0.0F);
      for (std::size_t i = 0; i < held.size(); ++i) held[i] += gradient_value(param, i, rank, round);
      seen_.push_back({rank, param});
    }
  }

  void reduce() {
    std::vector<std::vector<float>> sums(plan_.params().size());
    std::vector<bool> any(plan_.params().size(), false);
    for (const auto& [rank, param] : seen_) {
      any[at(param)] = true;
      auto& held = held_[at(rank)][at(param)];
      auto& sum = sums[at(param)];
      sum.resize(numel(param), 0.0F);
      for (std::size_t i = 0; i < held.size(); ++i) sum[i] += held[i];
      held.clear();
    }
    seen_.clear();
    for (std::size_t p = 0; p < sums.size(); ++p) {
      if (!any[p]) continue;
      total_[p].resize(sums[p].size(), 0.0F);
      present_.resize(total_.size(), false);
      for (std::size_t i = 0; i < sums[p].size(); ++i) {
        const float average = sums[p][i] / static_cast<float>(ranks_);
        total_[p][i] = present_[p] ? total_[p][i] + average : average;
      }
      present_[p] = true;
    }
  }

  void forget_round() {
    for (auto& of_rank : held_) {
      for (auto& held : of_rank) held.clear();
    }
    seen_.clear();
  }
  void drop() { present_.assign(total_.size(), false); }

  void check(const Client& client, int rank) const {
    for (std::size_t p = 0; p < total_.size(); ++p) {
      const auto param = static_cast<std::int32_t>(p);
      const bool present = p < present_.size() && present_[p];
      expect(client.present(param) == present, plan_.params()[p].name + ": has a gradient or none");
      if (!present) continue;
      const auto piece = plan_.piece(param, rank);
      for (std::size_t i = 0; i < static_cast<std::size_t>(piece.numel); ++i) {
        expect(client.gradient(param, i) == total_[p][static_cast<std::size_t>(piece.start) + i],
               plan_.params()[p].name + ": gradient");
      }
    }
  }

 private:
  std::size_t numel(std::int32_t param) const { return static_cast<std::size_t>(plan_.placement(param).numel); }

  const ShardPlan& plan_;
  int ranks_;
  std::vector<std::vector<std::vector<float>>> held_;  // per rank and parameter
  std::vector<std::pair<int, std::int32_t>> seen_;
  std::vector<std::vector<float>> total_;
  std::vector<bool> present_;
  std::vector<bool> will_report_;
};

class Rank {
 public:
  Rank(const ShardPlan& plan, int rank, int ranks, unsigned seed, SharedSource& source)
      : plan_(plan),
        rank_(rank),
        common_(seed),
        own_(seed * 31 + static_cast<unsigned>(rank)),
        client_(plan, rank),
        ledger_(plan, ranks),
        comm_(ShmOptions{rank, ranks, "", 60, 60, {}}, source.source()),
        engine_(plan, schedule(seed), comm_, device_, client_) {
    engine_.allocate();
    comm_.set_progress([this] { engine_.progress(); });
  }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      if (below(common_, 4) == 0) forward(false);
      const std::vector<std::int32_t> calls = forward(true);
      if (below(common_, 6) == 0) forward(false);  // between forward and backward
      backward(calls);
      if (below(common_, 3) != 0) {
        client_.drop_gradients();
        ledger_.drop();
      }
      client_.update(static_cast<std::uint64_t>(step) + 1);
    }
  }

 private:
  static Schedule schedule(unsigned seed) {
    Schedule schedule;
    schedule.reshard_after_forward.assign(at(kUnits), true);
    schedule.reshard_after_forward[0] = false;
    schedule.prefetch = static_cast<std::int32_t>(seed % 3);
    schedule.reduce_dtype = DType::kFloat32;
    schedule.has_reduce_dtype = true;
    return schedule;
  }

  // Units in the order of their calls, without the root.
  std::vector<std::int32_t> forward(bool backward_follows) {
    std::vector<std::int32_t> calls;
    engine_.begin_forward();
    engine_.before_forward(0);
    for (std::uint32_t left = 1 + below(common_, 8); left > 0; --left) {
      const auto unit = static_cast<std::int32_t>(1 + below(common_, kUnits - 1));
      const auto inner = static_cast<std::int32_t>(1 + below(common_, kUnits - 1));
      engine_.before_forward(unit);
      client_.check_gathered(unit);
      calls.push_back(unit);
      if (inner != unit && below(common_, 5) == 0) {
        engine_.before_forward(inner);
        client_.check_gathered(inner);
        engine_.after_forward(inner, backward_follows);
        client_.check_gathered(unit);
        calls.push_back(inner);
      }
      engine_.after_forward(unit, backward_follows);
    }
    client_.check_gathered(0);
    engine_.after_forward(0, backward_follows);
    engine_.end_forward(backward_follows);
    return calls;
  }

  void backward(const std::vector<std::int32_t>& calls) {
    const bool reduce = below(common_, 4) != 0;
    const std::size_t stop =
        below(common_, 6) == 0 ? below(common_, 1 + static_cast<std::uint32_t>(calls.size())) : ~std::size_t{0};
    engine_.set_reduce(reduce);
    ++round_;
    // Where ranks give up at the same place, each must have launched what the others wait for before it.
    client_.expect_gradients(round_, stop != ~std::size_t{0} || below(common_, 3) != 0);
    engine_.before_backward(0);
    client_.check_gathered(0);
    for (std::size_t k = calls.size(); k-- > 0;) {
      const std::int32_t unit = calls[k];
      if (k == stop) {
        engine_.abort();
        ledger_.forget_round();
        client_.drop_gradients();
        ledger_.drop();
        return;
      }
      if (below(common_, 8) == 0) continue;  // its output does not count
      engine_.before_backward(unit, 10 * k + 9, 10 * k + 1);
      client_.check_gathered(unit);
      const bool last = std::find(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(k), unit) ==
                        calls.begin() + static_cast<std::ptrdiff_t>(k);
      if (last) report(unit);
    }
    report(0);
    engine_.end_backward();
    if (reduce) {
      ledger_.reduce();
      ledger_.check(client_, rank_);
    }
  }

  // Gradients of a unit, in any order: each rank has its own.
  void report(std::int32_t unit) {
    std::vector<std::int32_t> params;
    for (const std::int32_t param : plan_.units()[at(unit)].params) {
      if (plan_.params()[at(param)].requires_grad) params.push_back(param);
    }
    for (const std::int32_t param : params) ledger_.add(param, round_);
    std::shuffle(params.begin(), params.end(), own_);
    for (const std::int32_t param : params) {
      if (!gradient_exists(param, rank_, round_)) continue;
      const std::size_t numel = static_cast<std::size_t>(plan_.placement(param).numel);
      std::vector<float> gradient(numel);
      for (std::size_t i = 0; i < numel; ++i) gradient[i] = gradient_value(param, i, rank_, round_);
      const auto to = engine_.gradient_destination(param);
      client_.check_gathered(unit);  // waiting for a slot must not cost it its place
      const auto* from = reinterpret_cast<const std::byte*>(gradient.data());
      if (to.add) {
        device_.add(to.where, to.dtype, from, DType::kFloat32, numel);
      } else {
        device_.cast(to.where, to.dtype, from, DType::kFloat32, numel);
      }
      engine_.gradient_ready(param);
    }
  }

  const ShardPlan& plan_;
  int rank_;
  Random common_;  // the same numbers on all ranks
  Random own_;
  std::uint64_t round_ = 0;
  HostDevice device_;
  Client client_;
  Ledger ledger_;
  ShmCommunicator comm_;
  Engine engine_;
};

bool stress(int ranks, int steps, unsigned seed) {
  const auto plan = make_plan(ranks, seed);
  SharedSource source;
  return in_threads(ranks, [&](int rank) { Rank(*plan, rank, ranks, seed, source).run(steps); });
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 100;
  const int seed = argc > 3 ? std::atoi(argv[3]) : 1;
  if (ranks < 1 || ranks > 64 || steps < 1 || seed < 1) {
    std::fprintf(stderr, "usage: engine_stress [ranks: 1 to 64] [steps: 1 or more] [seed: 1 or more]\n");
    return 2;
  }
  const bool all_right = stress(ranks, steps, static_cast<unsigned>(seed));
  std::printf("engine_stress: %d ranks, seed %d: %s\n", ranks, seed, all_right ? "all right" : "FAILED");
  return all_right ? 0 : 1;
}
