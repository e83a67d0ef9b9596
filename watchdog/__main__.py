"""`python -m watchdog`: the watchdog alone, for any engine on the machine."""

import sys

from watchdog.command import main

sys.exit(main())
