"""The sandbox, in which programs that a model wrote run: processes of their own, with limits."""

from cogumi.sandbox.pool import Limits, Sandbox, SandboxResult, default_sandbox

__all__ = ["Limits", "Sandbox", "SandboxResult", "default_sandbox"]
