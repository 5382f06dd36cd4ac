"""epikvd on a Ray cluster.

`app` is what `serve run epikv.ray:app model=/shared/model.pt` runs: a deployment of Ray Serve whose replicas own a
daemon each. `nodes` starts a daemon on every node, for a while (`epikv eval --ray`). Ray itself is imported when
they are used: the extra `ray` installs it.
"""

from typing import TYPE_CHECKING, Any

from epikv.ray.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application


def app(settings: Settings) -> "Application":
    """As Ray Serve's command line and its files of configuration call it."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from epikv.ray.replica import Replica
    from epikv.ray.scaling import ByWaiting

    number: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.autoscaling is not None:
        policy = AutoscalingPolicy(
            policy_function=ByWaiting,
            policy_kwargs={"waiting_per_replica": settings.waiting_per_replica},
        )
        number = {"autoscaling_config": AutoscalingConfig(**settings.autoscaling, policy=policy)}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="epikvd",
        # Who waits, waits in the daemon's queue, which knows priorities and tenants.
        max_ongoing_requests=settings.max_ongoing_requests,
        request_router_config=RequestRouterConfig(
            request_router_class="epikv.ray.router.PrefixRouter",
            request_router_kwargs={"balance_factor": settings.balance_factor},
        ),
        ray_actor_options={"num_cpus": settings.num_cpus, **settings.actor},
        graceful_shutdown_timeout_s=settings.drain_seconds + _END_SECONDS,
        **number,
    )
    return deployment.bind(settings.model_dump(mode="json"))


_END_SECONDS = 15  # that a daemon may take to end once nobody asks it
