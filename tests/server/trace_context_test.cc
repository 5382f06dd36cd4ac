#include "server/call/trace_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace epikv {
namespace trace_context_test {

using ::testing::MatchesRegex;

// The standard's own example.
const std::string kHeader = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

std::string Replaced(size_t at, const std::string& text) {
  return std::string(kHeader).replace(at, text.size(), text);
}

TEST(TraceContextTest, ReadsTheParts) {
  const auto trace = ParseTraceParent(kHeader);
  ASSERT_TRUE(trace.has_value());
  EXPECT_EQ(trace->trace_id, "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(trace->span_id, "00f067aa0ba902b7");
  EXPECT_TRUE(trace->sampled);
  EXPECT_EQ(trace->ToHeader(), kHeader);
}

TEST(TraceContextTest, OnlyTheLowestFlagIsKnown) {
  EXPECT_FALSE(ParseTraceParent(Replaced(53, "00"))->sampled);
  EXPECT_FALSE(ParseTraceParent(Replaced(53, "fe"))->sampled);
  EXPECT_TRUE(ParseTraceParent(Replaced(53, "ff"))->sampled);
  EXPECT_EQ(ParseTraceParent(Replaced(53, "ff"))->ToHeader(), kHeader);
}

TEST(TraceContextTest, LaterVersionsMayHaveMore) {
  EXPECT_TRUE(ParseTraceParent(Replaced(0, "cc")).has_value());
  EXPECT_TRUE(ParseTraceParent(Replaced(0, "cc") + "-what-the-future-brings").has_value());
  EXPECT_FALSE(ParseTraceParent(Replaced(0, "cc") + ".what").has_value());
}

TEST(TraceContextTest, WhatBreaksTheStandardIsNothing) {
  for (const std::string& bad :
       {std::string(), std::string("00"), kHeader + "-more", kHeader + " ", " " + kHeader,
        kHeader.substr(0, 54), Replaced(0, "ff"), Replaced(0, "0x"), Replaced(2, "_"),
        Replaced(35, "_"), Replaced(52, "_"), Replaced(3, std::string(32, '0')),
        Replaced(36, std::string(16, '0')), Replaced(3, "4BF9"), Replaced(40, "G"),
        Replaced(53, "0x"), Replaced(10, std::string(1, '\0'))}) {
    EXPECT_FALSE(ParseTraceParent(bad).has_value()) << bad;
  }
}

TEST(TraceContextTest, SpanIsNewInTheCallersTrace) {
  const auto caller = ParseTraceParent(kHeader);
  const TraceContext span = NewSpan(caller);
  EXPECT_EQ(span.trace_id, caller->trace_id);
  EXPECT_NE(span.span_id, caller->span_id);
  EXPECT_NE(span.span_id, NewSpan(caller).span_id);
  EXPECT_TRUE(span.sampled);
}

TEST(TraceContextTest, WithoutACallerTheTraceIsNewToo) {
  const TraceContext span = NewSpan(std::nullopt);
  EXPECT_THAT(span.ToHeader(), MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-00"));
  EXPECT_TRUE(ParseTraceParent(span.ToHeader()).has_value());
  EXPECT_NE(span.trace_id, NewSpan(std::nullopt).trace_id);
}

}  // namespace trace_context_test
}  // namespace epikv
