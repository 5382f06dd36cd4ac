# Tests of server/: the real services over a fake executor, without torch.
epikv_test(cancellation_test LIBS epikv_server)
epikv_test(config_test LIBS epikv_server)
epikv_test(errors_test LIBS epikv_server)
epikv_test(generation_service_test LIBS epikv_server)
epikv_test(metrics_test LIBS epikv_server)
epikv_test(outbox_test LIBS epikv_server)
epikv_test(services_test LIBS epikv_server)
