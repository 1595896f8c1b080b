from contextlib import nullcontext

import torch
from task import Net, accuracy, train
from torch.nn import functional as F

import shoal

run = shoal.init()
model = Net().to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(train, batch_size=32)

for epoch in run.epochs(20):
    for number, (inputs, classes) in enumerate(loader):
        last = number % 2 == 1
        with nullcontext() if last else run.accumulate():
            loss = F.cross_entropy(model(inputs.to(run.device)), classes.to(run.device))
            (loss / 2).backward()
        if last:
            run.clip_grad_norm_(0.2)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    mean = run.mean(loss.item())
    run.print(f"epoch {epoch}: loss {mean:.4f}")

result = run.evaluate(accuracy, model, run.device)
run.print(f"accuracy {result:.2f}")
run.save("model.safetensors")
