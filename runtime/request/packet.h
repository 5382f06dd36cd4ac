#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/kernels/kv_format.h"

namespace epikv {

// K and V of consecutive tokens, as some request had cached them at its end, in the machine's
// memory: all of them, or those that its policy had kept. Other requests begin with them in place
// of computing them (KV Packet, arXiv 2604.13226). Immutable and shared. Without torch.
struct Packet {
  // Of lanes that share a keep decision: which tokens there are, ascending, and the RoPE position
  // that each had.
  struct Table {
    std::vector<int32_t> index, position;
    int64_t rows() const { return static_cast<int64_t>(index.size()); }
  };

  KvFormat format;
  int64_t num_layers = 0, num_kv_heads = 0, key_width = 0, value_width = 0;
  bool turned = true;           // keys are rotated to their positions
  std::vector<int32_t> tokens;  // kept or not. A soft token has the id of the nearest real one
  std::vector<Table> tables;    // one, one per layer, or one per lane
  // Rows of lane 0, of lane 1 ..; of each lane in the order of its table.
  std::unique_ptr<char[]> keys, values;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_lanes() const { return num_layers * num_kv_heads; }
  const Table& TableOf(int64_t lane) const {
    return tables[lane * static_cast<int64_t>(tables.size()) / num_lanes()];
  }
  // Over all lanes.
  int64_t rows() const {
    int64_t rows = 0;
    for (const Table& table : tables) rows += table.rows();
    return rows * num_lanes() / static_cast<int64_t>(tables.size());
  }
  int64_t key_bytes() const { return rows() * format.RowBytes(key_width); }
  int64_t value_bytes() const { return rows() * format.RowBytes(value_width); }
  int64_t bytes() const {
    int64_t bytes = key_bytes() + value_bytes() + num_tokens() * 4;
    for (const Table& table : tables) bytes += table.rows() * 8;
    return bytes;
  }
};

}  // namespace epikv
