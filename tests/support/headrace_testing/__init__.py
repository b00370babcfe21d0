"""What the tests of all services share: real dependencies, fakes, a clock."""
