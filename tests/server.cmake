# Tests of server/: the real services over a fake executor, without torch.
epikv_test(access_log_test LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(config_test LIBS epikv_server)
epikv_test(errors_test LIBS epikv_server)
epikv_test(experiment_assignment_test LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(experiment_definition_test LIBS epikv_server)
epikv_test(experiment_edits_test LIBS epikv_server)
epikv_test(experiment_report_test LIBS epikv_server)
epikv_test(experiment_simulation_test LIBS epikv_server)
# One process: their PostgreSQL server takes a second to start.
epikv_test(experiment_store_test SHARDS 1 LIBS epikv_server)
epikv_test(experiment_switchback_test SHARDS 1 LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(file_contents_test LIBS epikv_server)
epikv_test(log_test LIBS epikv_server)
epikv_test(metrics_test LIBS epikv_server)
epikv_test(outbox_test LIBS epikv_server)
epikv_test(planner_test LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(statistics_test LIBS epikv_server nlohmann_json::nlohmann_json)
epikv_test(recorder_test SHARDS 1 LIBS epikv_server)
epikv_test(spool_test LIBS epikv_server)
epikv_test(task_thread_test LIBS epikv_server)
epikv_test(tokens_test LIBS epikv_server)
epikv_test(trace_context_test LIBS epikv_server)

# What recorder_test kills.
add_executable(recorder_crash recorder_crash.cc)
target_link_libraries(recorder_crash PRIVATE epikv_server)
if(TARGET epikv_tsan_absl)
  target_sources(recorder_crash PRIVATE $<TARGET_OBJECTS:epikv_tsan_absl>)
  target_link_libraries(recorder_crash PRIVATE absl::synchronization ${CMAKE_DL_LIBS})
endif()
add_dependencies(recorder_test recorder_crash)
target_compile_definitions(recorder_test PRIVATE
  EPIKV_RECORDER_CRASH="$<TARGET_FILE:recorder_crash>")

# What `epikv bench experiment` runs.
add_executable(experiment_costs experiment_costs.cc)
target_link_libraries(experiment_costs PRIVATE epikv_server)

# Over real gRPC, which Debian builds without the sanitizer: it hands calls from thread to thread by
# atomics that ThreadSanitizer does not see, so that every call looks like a race. outbox_test
# stands in for these there: engine thread, outboxes and courier with writers of its own.
if(NOT EPIKV_SANITIZE MATCHES thread)
  epikv_test(admin_service_test LIBS epikv_server)
  epikv_test(call_scope_test LIBS epikv_server nlohmann_json::nlohmann_json)
  epikv_test(cancellation_test LIBS epikv_server)
  epikv_test(experiment_requests_test LIBS epikv_server)
  epikv_test(experiment_service_test LIBS epikv_server)
  epikv_test(generation_service_test LIBS epikv_server)
  epikv_test(health_check_test LIBS epikv_server)
  epikv_test(shadow_test LIBS epikv_server)
  epikv_test(models_test LIBS epikv_server)
  epikv_test(auth_test LIBS epikv_server)
  epikv_test(tls_test LIBS epikv_server)
  epikv_test(transport_test LIBS epikv_server)
  epikv_test(services_test LIBS epikv_server nlohmann_json::nlohmann_json)
endif()

# Over a real engine, too. Its own part includes no torch: see runtime.h.
if(EPIKV_TORCH AND NOT EPIKV_SANITIZE MATCHES thread)
  add_library(epikv_broken_policy STATIC broken_policy.cc)
  target_link_libraries(epikv_broken_policy PRIVATE epikv_policies)
  target_precompile_headers(epikv_broken_policy REUSE_FROM epikv_torch_pch)
  epikv_test(broken_policy_test MODELS SHARDS 1 LIBS epikv_broken_policy epikv_server epikv_runtime)
endif()
