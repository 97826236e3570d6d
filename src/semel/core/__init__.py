"""The core decides. It never waits or touches a store; time is an argument, with few exceptions."""
