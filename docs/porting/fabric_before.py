import torch
from lightning.fabric import Fabric
from task import Net, accuracy, train
from torch.nn import functional as F
from torch.utils.data import DataLoader

fabric = Fabric(devices=3, strategy="ddp")
fabric.launch()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=32, shuffle=True))

for epoch in range(20):
    for number, (inputs, classes) in enumerate(loader):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(inputs), classes)
            fabric.backward(loss / 2)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch}: loss {mean:.4f}")

if fabric.is_global_zero:
    print(f"accuracy {accuracy(model.module, fabric.device):.2f}")
fabric.save("model.ckpt", {"model": model})
