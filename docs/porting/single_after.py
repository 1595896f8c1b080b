import torch
from task import Net, accuracy, train
from torch.nn import functional as F

import shoal

run = shoal.init()
model = Net().to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
model, optimizer = run.prepare(model, optimizer)
loader = run.loader(train, batch_size=64)

for epoch in run.epochs(20):
    for inputs, classes in loader:
        loss = F.cross_entropy(model(inputs.to(run.device)), classes.to(run.device))
        optimizer.zero_grad()
        loss.backward()
        run.clip_grad_norm_(0.2)
        optimizer.step()
    scheduler.step()
    run.print(f"epoch {epoch}: loss {loss:.4f}")

result = run.evaluate(accuracy, model, run.device)
run.print(f"accuracy {result:.2f}")
run.save("model.safetensors")
