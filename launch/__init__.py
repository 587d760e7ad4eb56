"""Many runs: laying them out, launching them, and putting their results side by side."""
