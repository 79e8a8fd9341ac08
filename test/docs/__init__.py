"""A package: another folder has a ``test_commands`` too."""
