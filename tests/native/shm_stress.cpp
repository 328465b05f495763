// Threads as ranks of one shared-memory communicator, for the sanitizers: every gathered value and every gradient is
// written and read without any other synchronisation than the communicator's own. Exit status 0: all values were right.
//
//   shm_stress [ranks=4] [steps=300]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/stress.h"
#include "host/host_device.h"
#include "host/shm_communicator.h"
#include "threads_as_ranks.h"

namespace {

using tt::DType;
using tt::PeerError;
using tt::host::HostDevice;
using tt::host::ShmCommunicator;
using tt::host::ShmOptions;
using tt::runtime::Contribution;
using tt::runtime::kNoGradient;
using tt::runtime::MemoryLayout;
using tt::runtime::Segments;
using tt::runtime::SumSpec;
using tt::runtime::Tag;
using tt::test::expect;
using tt::test::in_threads;
using tt::test::SharedSource;

constexpr std::size_t kShard = 129;  // elements
constexpr std::uint32_t kPlaces = 3;
constexpr std::uint32_t kBuckets = 2;

MemoryLayout layout_for(int ranks) {
  MemoryLayout layout;
  const std::size_t bytes = static_cast<std::size_t>(ranks) * kShard * sizeof(float);
  layout.gather_bytes = layout.gather_reserved_bytes = kPlaces * bytes;
  layout.reduce_bytes = layout.reduce_reserved_bytes = 2 * kBuckets * bytes;
  layout.places = kPlaces;
  layout.bucket_params = {65, 1};
  layout.unit_names = {"a", "b"};
  return layout;
}

class Rank {
 public:
  Rank(int rank, int ranks, SharedSource& source) : comm_(ShmOptions{rank, ranks, "", 60, 60, {}}, source.source()) {
    comm_.allocate(layout_for(ranks));
  }

  void run(std::uint64_t steps) {
    launch_gather(1);
    for (std::uint64_t step = 1; step <= steps; ++step) {
      if (step < steps) launch_gather(step + 1);
      use_gather(step);
      reduce(step);
    }
  }

  ShmCommunicator& comm() { return comm_; }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(comm_.size()); }
  static std::uint32_t place_of(std::uint64_t sequence) { return static_cast<std::uint32_t>(sequence % kPlaces); }
  static Tag tag_of(std::uint64_t sequence) { return {static_cast<std::uint32_t>(sequence % 2), sequence}; }
  std::size_t place_offset(std::uint32_t place) const { return place * ranks() * kShard * sizeof(float); }
  static float value(std::uint64_t number, std::size_t rank) { return static_cast<float>(number * 8 + rank); }

  float* gathered(std::uint32_t place) { return reinterpret_cast<float*>(comm_.gather_memory(place_offset(place))); }

  void launch_gather(std::uint64_t sequence) {
    const std::uint32_t place = place_of(sequence);
    comm_.wait_place_free(place);
    const std::size_t rank = static_cast<std::size_t>(comm_.rank());
    const std::vector<float> master(kShard, value(sequence, rank));
    device_.cast(reinterpret_cast<std::byte*>(gathered(place) + rank * kShard), DType::kFloat32,
                 reinterpret_cast<const std::byte*>(master.data()), DType::kFloat32, kShard);
    const Segments segments{place_offset(place), kShard * sizeof(float)};
    comm_.launch_gather(place, tag_of(sequence), {&segments, 1});
  }

  void use_gather(std::uint64_t sequence) {
    tt::stress_delay();
    const std::uint32_t place = place_of(sequence);
    comm_.wait_gather(place, tag_of(sequence));
    for (std::size_t i = 0; i < ranks() * kShard; ++i) {
      expect(gathered(place)[i] == value(sequence, i / kShard), "gathered value");
    }
    comm_.release(place);
  }

  void reduce(std::uint64_t round) {
    const std::size_t rank = static_cast<std::size_t>(comm_.rank());
    const std::size_t bucket_bytes = ranks() * kShard * sizeof(float);
    for (std::uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
      if (round > 2) comm_.wait_contribution_free(bucket, round - 2);
      Contribution contribution{bucket, round, kNoGradient, kShard, DType::kFloat32, {}};
      if (has_gradient(rank, bucket, round)) {
        contribution.offset = (round % 2 * kBuckets + bucket) * bucket_bytes;
        contribution.reported = {std::uint64_t{1} << rank};
        auto* gradients = reinterpret_cast<float*>(comm_.reduce_memory(contribution.offset));
        for (std::size_t i = 0; i < ranks() * kShard; ++i)
          gradients[i] = value(round, rank) + static_cast<float>(i / kShard);
      }
      tt::stress_delay();
      comm_.launch_reduce(contribution);
    }
    comm_.close_round(round);
    for (std::uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
      if (!comm_.wait_reduce_ready_or_stuck(bucket, round)) comm_.wait_reduce_ready(bucket, round);
      float expected = 0;
      std::uint64_t reported = 0;
      for (std::size_t peer = 0; peer < ranks(); ++peer) {
        if (!has_gradient(peer, bucket, round)) continue;
        expected += value(round, peer) + static_cast<float>(rank);
        reported |= std::uint64_t{1} << peer;
      }
      expect(comm_.reported_anywhere(bucket, round)[0] == reported, "reported");
      std::vector<float> sum(kShard, -1);
      const auto segments = comm_.my_segment_everywhere(bucket, round);
      device_.sum(reinterpret_cast<std::byte*>(sum.data()), segments, kShard,
                  SumSpec{DType::kFloat32, DType::kFloat32, DType::kFloat32});
      tt::stress_delay();
      comm_.finish_reduce(bucket, round);
      for (float element : sum) expect(element == expected, "sum");
    }
  }

  static bool has_gradient(std::size_t rank, std::uint32_t bucket, std::uint64_t round) {
    return (rank + bucket + round) % 3 != 0;
  }

  ShmCommunicator comm_;
  HostDevice device_;
};

bool stress(int ranks, std::uint64_t steps) {
  SharedSource source;
  return in_threads(ranks, [&](int rank) { Rank(rank, ranks, source).run(steps); });
}

// Every rank gathers unit unit_of(rank); all must end with a PeerError that contains `words`. The last one fails
// instead where `last_fails`.
template <typename UnitOf>
bool all_end(int ranks, const char* words, bool last_fails, const UnitOf& unit_of) {
  SharedSource source;
  return in_threads(ranks, [&](int rank) {
    ShmCommunicator comm(ShmOptions{rank, ranks, "", 60, 60, {}}, source.source());
    try {
      comm.allocate(layout_for(ranks));  // a rank that is quick to fail ends the others here
      if (last_fails && rank == ranks - 1) {
        comm.fail("test");
        return;
      }
      const Tag tag{unit_of(rank), 1};
      comm.launch_gather(0, tag, {});
      comm.wait_gather(0, tag);
    } catch (const PeerError& error) {
      expect(std::strstr(error.what(), words) != nullptr, error.what());
      return;
    }
    expect(false, "no PeerError");
  });
}

bool failure(int ranks) {
  return all_end(ranks, "failed: test", true, [](int) { return 0U; });
}

bool come_apart(int ranks) {
  return all_end(ranks, "ranks have come apart", false, [](int rank) { return static_cast<std::uint32_t>(rank); });
}

// The same over the socket, each rank with its own mapping.
bool over_socket(int ranks, std::uint64_t steps) {
  const std::string name = "shm_stress-" + std::to_string(::getpid()) + "-" + std::to_string(std::random_device{}());
  return in_threads(ranks, [&](int rank) {
    ShmCommunicator comm(ShmOptions{rank, ranks, name, 60, 60, {}});
    comm.allocate(layout_for(ranks));
    for (std::uint64_t sequence = 1; sequence <= steps; ++sequence) {
      const auto place = static_cast<std::uint32_t>(sequence % kPlaces);
      comm.wait_place_free(place);
      comm.launch_gather(place, {0, sequence}, {});
      comm.wait_gather(place, {0, sequence});
      comm.release(place);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 300;
  if (ranks < 2 || ranks > 64 || steps < 1) {
    std::fprintf(stderr, "usage: shm_stress [ranks: 2 to 64] [steps: 1 or more]\n");
    return 2;
  }
  const auto count = static_cast<std::uint64_t>(steps);
  const bool all_right = stress(ranks, count) && failure(ranks) && come_apart(ranks) && over_socket(ranks, count);
  std::puts(all_right ? "shm_stress: all right" : "shm_stress: FAILED");
  return all_right ? 0 : 1;
}
