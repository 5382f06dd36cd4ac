#include "server/dialect/orca_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/metrics/load_reports.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/generation_fixture.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"
#include "xds/service/orca/v3/orca.grpc.pb.h"

namespace epikv {
namespace orca_service_test {

using ::testing::Key;
using ::testing::UnorderedElementsAre;
using xds::data::orca::v3::OrcaLoadReport;
using xds::service::orca::v3::OpenRcaService;

// What is behind requests, gRPC's own clients keep to themselves:
// e2e/operating/load_reports_test.py.
class OrcaServiceTest : public GenerationServiceTest {
 protected:
  void SetUp() override {
    script_->next = [](int32_t token) { return token % 60 + 1; };
    Start({.word_bytes = 8192, .outbox = {.max_messages = 4}, .load_reports = true});
  }

  std::unique_ptr<OpenRcaService::Stub> orca() {
    return OpenRcaService::NewStub(server_->Connect());
  }
  OrcaLoadReport Report() {
    grpc::ClientContext context;
    const auto watch = orca();
    const auto reader = watch->StreamCoreMetrics(&context, {});
    OrcaLoadReport report;
    EXPECT_TRUE(reader->Read(&report));
    context.TryCancel();
    reader->Finish();
    return report;
  }
};

TEST_F(OrcaServiceTest, RequestsAreCounted) {
  EXPECT_EQ(Report().rps_fractional(), 0);
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Prompt(10, 3), &result).ok());
  const OrcaLoadReport first = Report();
  EXPECT_NEAR(first.rps_fractional(), .1, .01) << "one in the window of ten seconds";
  EXPECT_EQ(first.eps(), 0);
  EXPECT_LT(first.application_utilization(), 0.01) << "for a moment of ten seconds";
  ASSERT_TRUE(Once(Prompt(10, 3), &result).ok());
  const OrcaLoadReport second = Report();
  EXPECT_NEAR(second.rps_fractional(), .2, .02);
  EXPECT_THAT(second.named_metrics(),
              UnorderedElementsAre(Key("running_requests"), Key("waiting_requests"),
                                   Key("predicted_wait_seconds")));
  Cancel("nobody");
  EXPECT_LE(Report().rps_fractional(), second.rps_fractional()) << "no request";
}

TEST_F(OrcaServiceTest, WhatTheClientDidIsNoErrorOfTheServer) {
  v1::GenerateRequest wrong = Prompt(10, 3);
  wrong.mutable_sampling()->set_temperature(-1);
  EXPECT_FALSE(Refused(wrong).ok());
  EXPECT_GT(Report().rps_fractional(), 0);
  EXPECT_EQ(Report().eps(), 0);
  script_->on_settle = [](const WorkItem&) { return absl::InternalError("failed"); };
  EXPECT_EQ(Refused(Prompt(10, 3)).error_code(), grpc::INTERNAL);
  EXPECT_NEAR(Report().eps(), .1, .01);
}

TEST_F(OrcaServiceTest, NobodyIsToldUnlessAsked) {
  Start();
  grpc::ClientContext context;
  OrcaLoadReport report;
  const auto watch = orca();
  const auto reader = watch->StreamCoreMetrics(&context, {});
  EXPECT_FALSE(reader->Read(&report));
  EXPECT_EQ(reader->Finish().error_code(), grpc::UNIMPLEMENTED);
}

TEST_F(OrcaServiceTest, AWatcherSeesWhatRuns) {
  const auto watch = orca();
  grpc::ClientContext context;
  const auto reader = watch->StreamCoreMetrics(&context, {});
  OrcaLoadReport report;
  ASSERT_TRUE(reader->Read(&report)) << "at once";
  EXPECT_EQ(report.application_utilization(), 0);
  StreamClient unread(stub(), Prompt(10, 200), /*reads=*/1);
  ASSERT_TRUE(
      server_->observer().AwaitStep([](const StepStats& step) { return step.running == 1; }));
  const absl::Time begin = absl::Now();
  ASSERT_TRUE(reader->Read(&report));
  EXPECT_GT(absl::Now() - begin, absl::Milliseconds(100)) << "an interval of none is a second";
  EXPECT_EQ(report.named_metrics().at("running_requests"), 1);
  EXPECT_GT(report.application_utilization(), 0);
  unread.Cancel();
  unread.AwaitDone();
  context.TryCancel();
  EXPECT_FALSE(reader->Read(&report));
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
}

TEST_F(OrcaServiceTest, AWatcherOfADrainingServerIsToldToGo) {
  const auto watch = orca();
  grpc::ClientContext context;
  const auto reader = watch->StreamCoreMetrics(&context, {});
  OrcaLoadReport report;
  ASSERT_TRUE(reader->Read(&report));
  server_->lifecycle().SetState(ServerState::kDraining);
  EXPECT_FALSE(reader->Read(&report));
  EXPECT_EQ(reader->Finish().error_code(), grpc::UNAVAILABLE);
}

}  // namespace orca_service_test
}  // namespace epikv
