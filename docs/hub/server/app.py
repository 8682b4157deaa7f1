import envs
from integrations.openenv import application

app = application(envs.make("NAME"))
