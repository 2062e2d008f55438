from burstline.api import Figure as Figure
from burstline.api import LoadedRun as LoadedRun
from burstline.api import load as load
from burstline.servers.engine import Engine as Engine

__version__: str
