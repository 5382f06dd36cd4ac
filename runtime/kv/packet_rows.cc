#include "runtime/kv/packet_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

// Cosines and sines of one rope, by how far keys move, as Rotate (kernels.h) takes them.
using Turns = std::map<int32_t, std::vector<float>>;

// scale: what keys are multiplied by besides.
void AddTurn(const Rope& rope, int32_t by, double scale, Turns& turns) {
  std::vector<float>& cos_sin = turns[by];
  if (!cos_sin.empty()) return;
  const auto half = rope.inv_freq.size();
  cos_sin.resize(2 * half);
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(by) * rope.inv_freq[i];
    cos_sin[i] = static_cast<float>(scale * std::cos(angle));
    cos_sin[half + i] = static_cast<float>(scale * std::sin(angle));
  }
}

}  // namespace

std::shared_ptr<const Packet> PacketOf(const SequenceCache& cache, const KvPool& pool,
                                       PositionMode positions, absl::Span<const int32_t> tokens) {
  auto packet = std::make_shared<Packet>();
  packet->format = pool.format();
  packet->num_layers = cache.num_layers();
  packet->num_kv_heads = cache.num_kv_heads();
  packet->key_width = cache.shape().key_width;
  packet->value_width = cache.shape().value_width;
  packet->turned = positions != PositionMode::kCache;
  packet->tokens = {tokens.begin(), tokens.end()};
  std::vector<std::vector<int64_t>> slots(cache.num_tables());  // by index
  for (int64_t t = 0; t < cache.num_tables(); ++t) {
    const SlotTable& table = cache.table(t);
    for (int64_t slot = 0; slot < table.used(); ++slot) {
      if (slot != table.hole()) slots[t].push_back(slot);
    }
    std::sort(slots[t].begin(), slots[t].end(),
              [index = table.index()](int64_t a, int64_t b) { return index[a] < index[b]; });
    Packet::Table& to = packet->tables.emplace_back();
    for (const int64_t slot : slots[t]) {
      to.index.push_back(table.index()[slot]);
      to.position.push_back(table.rope_position()[slot]);
    }
  }
  packet->keys = std::make_unique_for_overwrite<char[]>(packet->key_bytes());
  packet->values = std::make_unique_for_overwrite<char[]>(packet->value_bytes());
  const int64_t key_bytes = pool.key_bytes(), value_bytes = pool.value_bytes();
  char *key = packet->keys.get(), *value = packet->values.get();
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const LaneRows lane = cache.Lane(layer, head);
      for (const int64_t slot : slots[cache.TableOf(layer, head)]) {
        std::memcpy(key, lane.keys + slot * key_bytes, key_bytes);
        std::memcpy(value, lane.values + slot * value_bytes, value_bytes);
        key += key_bytes;
        value += value_bytes;
      }
    }
  }
  return packet;
}

void LoadPacket(const Packet& packet, const Manifest& manifest, PositionMode positions,
                SequenceCache& cache) {
  const int64_t lanes = packet.num_lanes(), heads = packet.num_kv_heads;
  const KvFormat& format = packet.format;
  const int64_t key_bytes = format.RowBytes(packet.key_width);
  const int64_t value_bytes = format.RowBytes(packet.value_width);
  // Where each table's tokens go, and how far their keys have to turn.
  std::vector<Packet::Table> tables;
  std::vector<std::vector<int32_t>> turn_by;
  for (int64_t t = 0; t < cache.num_tables(); ++t) {
    const Packet::Table& from = packet.TableOf(t * lanes / cache.num_tables());
    Packet::Table to{.index = from.index, .position = from.index};
    const auto first = static_cast<int32_t>(cache.NextPosition(t));
    if (positions != PositionMode::kAbsolute) {  // how many are kept before
      std::iota(to.position.begin(), to.position.end(), 0);
    }
    std::vector<int32_t>& by = turn_by.emplace_back(from.rows());
    for (int64_t i = 0; i < from.rows(); ++i) {
      to.position[i] += first;
      by[i] = (positions == PositionMode::kCache ? 0 : to.position[i]) -
              (packet.turned ? from.position[i] : 0);
    }
    tables.push_back(std::move(to));
  }
  std::vector<Turns> turns(manifest.ropes.size());
  const bool turned = positions != PositionMode::kCache;  // keys of the cache are
  for (size_t r = 0; r < turns.size(); ++r) {
    const Rope& rope = manifest.ropes[r];
    const double scale = packet.turned == turned ? 1
                         : turned                ? rope.attention_factor
                                                 : 1 / rope.attention_factor;
    for (const std::vector<int32_t>& of_table : turn_by) {
      for (const int32_t by : of_table) AddTurn(rope, by, scale, turns[r]);
    }
  }
  std::vector<int64_t> starts;  // of lanes, in the packet's rows
  int64_t rows = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    starts.push_back(rows);
    rows += packet.TableOf(lane).rows();
    const int64_t table = cache.TableOf(lane / heads, lane % heads);
    if (cache.NextSlot(table) + packet.TableOf(lane).rows() >
        cache.capacity(lane / heads, lane % heads)) {
      throw std::logic_error("a lane has no room for a packet");
    }
  }
  at::parallel_for(0, lanes, 1, [&](int64_t begin, int64_t end) {
    std::vector<char> row(packet.key_width * ElementBytes(format.model));
    for (int64_t lane = begin; lane < end; ++lane) {
      const int64_t layer = lane / heads, table = cache.TableOf(layer, lane % heads);
      const LaneRows to = cache.Lane(layer, lane % heads);
      const int64_t slot = cache.NextSlot(table), count = packet.TableOf(lane).rows();
      const auto rope_of_layer = static_cast<size_t>(manifest.layers[layer].rope);
      const Rope& rope = manifest.ropes[rope_of_layer];
      std::memcpy(to.values + slot * value_bytes, packet.values.get() + starts[lane] * value_bytes,
                  count * value_bytes);
      for (int64_t i = 0; i < count; ++i) {
        const char* const key = packet.keys.get() + (starts[lane] + i) * key_bytes;
        char* const out = to.keys + (slot + i) * key_bytes;
        const int32_t by = turn_by[table][i];
        if (by == 0 && packet.turned == turned) {  // the very bits
          std::memcpy(out, key, key_bytes);
          continue;
        }
        ReadRow(key, row.data(), packet.key_width, format);
        Rotate(row.data(), row.data(), packet.key_width, static_cast<int64_t>(rope.inv_freq.size()),
               rope.layout == Rope::Layout::kInterleaved, turns[rope_of_layer].at(by).data(),
               format.model);
        WriteRow(row.data(), out, packet.key_width, format);
      }
    }
  });
  cache.Adopt(packet.num_tokens(), tables);
}

}  // namespace epikv
