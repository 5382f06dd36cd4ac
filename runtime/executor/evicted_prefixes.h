#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "runtime/kv/kv_pool.h"
#include "runtime/request/request.h"
#include "runtime/step/step_item.h"

namespace epikv {

// What policies have left of prompts' beginnings at places where a round may be: rows in the pool
// that no request has reserved, and the policy's state. A request of the same policy, parameters,
// budget and protection whose prompt begins so goes on from there. What was used least recently
// goes first. Engine thread.
//
// A prompt leaves two: at its last place before its end, and at the last that it has in common with
// a prompt seen before, such as behind a document that many ask about. A policy may have asked for
// the request's seed, or for how long its prompt is: what it has left then serves requests that
// have the same.
class EvictedPrefixes {
 public:
  // chunk: tokens of a prompt between two such places.
  EvictedPrefixes(KvPool& pool, int64_t chunk) : pool_(pool), chunk_(chunk) {}

  int64_t bytes() const { return bytes_; }

  // From now on they hold at most so many bytes.
  void Limit(int64_t bytes);
  void Clear();

  // What a request can go on from. Valid until Limit or Keep.
  struct Found {
    const OpenSequence* sequence = nullptr;  // null: nothing
    int64_t tokens = 0;
  };
  Found Match(const Request& request);
  // Where the request's prompt is to be kept, ascending.
  std::vector<int64_t> PlacesOf(const Request& request);

  // Keeps a copy of what is left of the prompt's first `tokens`, its policy's state as well. If it
  // throws, or there is no room, nothing is kept.
  void Keep(const OpenSequence& sequence, int64_t tokens);

 private:
  struct Entry {
    Entry(SequenceId id, const OpenSequence& from, std::string identity, int64_t tokens);

    const Request request;  // what the copy needs of the one that left it
    OpenSequence sequence;
    const std::string identity;
    const std::vector<int32_t> tokens;
    const int64_t prompt_tokens;
    int64_t bytes = 0;
  };
  using Entries = std::list<Entry>;

  void Drop(Entries::iterator entry);

  KvPool& pool_;
  const int64_t chunk_;
  Entries entries_;  // what was used last comes first
  int64_t bytes_ = 0, limit_ = 0;
  struct Seen {
    std::string identity;
    std::vector<int32_t> prompt;
  };
  std::list<Seen> seen_;  // the newest first
  int64_t seen_tokens_ = 0;
  int64_t kept_ = 0;  // so far; names their rows
};

}  // namespace epikv
