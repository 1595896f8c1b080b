import torch
from accelerate import Accelerator
from task import Net, accuracy, train
from torch.nn import functional as F
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = DataLoader(train, batch_size=32, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

for epoch in range(20):
    for inputs, classes in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"epoch {epoch}: loss {mean:.4f}")

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print(f"accuracy {accuracy(accelerator.unwrap_model(model), accelerator.device):.2f}")
accelerator.save_model(model, ".")
accelerator.end_training()
