#include "runtime/kv/packet_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

// Where packets' tokens go and how their keys turn, against the authors' code
// (golden/make_packets.py). The laws of packets in an engine are laws/packet_laws_test.cc.

namespace epikv {
namespace packet_rows_test {

using nlohmann::json;
using testing::ElementsAreArray;

const json& Golden() {
  static const auto& golden =
      *new json(json::parse(std::ifstream(EPIKV_SOURCE_DIR "/tests/golden/packets.json")));
  return golden;
}

// A cache of one layer that packets are loaded into, in fp32.
class LoadedCache {
 public:
  LoadedCache(int64_t heads, int64_t width, std::vector<double> inv_freq, int64_t capacity)
      : shape_{.num_layers = 1,
               .num_heads = heads,
               .num_kv_heads = heads,
               .key_width = width,
               .value_width = width},
        pool_(heads * capacity, width, width, KvFormat{DType::kFloat32}) {
    manifest_.ropes = {{.inv_freq = std::move(inv_freq)}};
    manifest_.layers = {{.key_width = width, .value_width = width}};
    request_.demand.budget.assign(heads, capacity);
    request_.demand.prefill = request_.demand.decode = request_.demand.budget;
    cache_ = std::make_unique<SequenceCache>(pool_, SequenceId(0), request_, shape_);
  }

  // keys: [heads, rows, width]. The values are the same.
  void Load(std::vector<int32_t> index, std::vector<int32_t> position, int64_t num_tokens,
            const std::vector<float>& keys) {
    Packet packet;
    packet.format = pool_.format();
    packet.num_layers = 1;
    packet.num_kv_heads = shape_.num_kv_heads;
    packet.key_width = packet.value_width = shape_.key_width;
    packet.tokens.assign(num_tokens, 5);
    packet.tables = {{std::move(index), std::move(position)}};
    for (auto* rows : {&packet.keys, &packet.values}) {
      *rows = std::make_unique<char[]>(packet.key_bytes());
      std::memcpy(rows->get(), keys.data(), packet.key_bytes());
    }
    LoadPacket(packet, manifest_, PositionMode::kAbsolute, *cache_);
  }
  std::vector<float> Keys(int64_t head) const { return Rows(cache_->Lane(0, head).keys); }
  std::vector<float> Values(int64_t head) const { return Rows(cache_->Lane(0, head).values); }
  const SequenceCache& cache() const { return *cache_; }

 private:
  std::vector<float> Rows(const char* lane) const {
    std::vector<float> rows(cache_->table(0).used() * shape_.key_width);
    std::memcpy(rows.data(), lane, rows.size() * sizeof(float));
    return rows;
  }

  ModelShape shape_;
  KvPool pool_;
  Manifest manifest_;
  Request request_;
  std::unique_ptr<SequenceCache> cache_;
};

TEST(PacketRows, KeysTurnAsTheAuthorsTurnThem) {
  for (const json& run : Golden()["rotations"]) {
    const int64_t heads = run["heads"], width = run["width"];
    const std::vector<int32_t> from = run["positions"], to = run["moved_to"];
    const std::vector<float> keys = run["keys"], moved = run["moved"];
    const auto rows = std::ssize(from);
    // Their tokens move in any order; those of a packet ascend.
    std::vector<int64_t> order(rows);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return to[a] < to[b]; });
    std::vector<int32_t> index, position;
    for (const int64_t i : order) {
      index.push_back(to[i]);
      position.push_back(from[i]);
    }
    const auto ordered = [&](const std::vector<float>& theirs) {
      std::vector<float> ours;
      for (int64_t head = 0; head < heads; ++head) {
        for (const int64_t i : order) {
          const auto row = theirs.begin() + (head * rows + i) * width;
          ours.insert(ours.end(), row, row + width);
        }
      }
      return ours;
    };
    const std::vector<float> before = ordered(keys), after = ordered(moved);
    LoadedCache loaded(heads, width, run["inv_freq"], rows);
    loaded.Load(index, position, index.back() + 1, before);
    for (int64_t head = 0; head < heads; ++head) {
      const std::vector<float> got = loaded.Keys(head);
      for (int64_t i = 0; i < rows * width; ++i) {
        // Angles of theirs are fp32 products, off by the more the farther a token moves.
        const double bound = 1e-5 + 2.5e-7 * std::abs(index[i / width] - position[i / width]);
        EXPECT_NEAR(got[i], after[head * rows * width + i], bound) << run["rope"] << " " << i;
      }
      EXPECT_THAT(loaded.Values(head), ElementsAreArray(absl::MakeSpan(before).subspan(
                                           head * rows * width, rows * width)));
    }
    EXPECT_THAT(loaded.cache().table(0).rope_position(), ElementsAreArray(index));
  }
}

TEST(PacketRows, TokensGoWhereTheAuthorsMoveThem) {
  for (const json& run : Golden()["assemblies"]) {
    const std::vector<int32_t> parts = run["parts"], kept = run["kept"], local = run["local"];
    const std::vector<int32_t> moved_to = run["moved_to"];
    LoadedCache loaded(1, 4, {1, 0.1}, std::ssize(moved_to));
    auto from = local.begin();
    for (size_t part = 0; part < parts.size(); ++part) {
      const std::vector<int32_t> rows(from, from + kept[part]);
      loaded.Load(rows, rows, parts[part], std::vector<float>(4 * rows.size(), 1));
      from += kept[part];
    }
    EXPECT_THAT(loaded.cache().table(0).rope_position(), ElementsAreArray(moved_to));
    EXPECT_EQ(loaded.cache().NextPosition(0), run["question_at"]);
    EXPECT_EQ(loaded.cache().next(), run["question_at"]);
  }
}

}  // namespace packet_rows_test
}  // namespace epikv
